"""What programs do on ranks as they would anywhere: bytes, forks, threads that outlive the script, their own exits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mpkit as mk
from mpkit.cli.watch import CommandProgram


def test_bytes_and_files_of_the_standard_output(
    clusters: Callable[[int], mk.Cluster], capsys: pytest.CaptureFixture[str]
) -> None:
    def talk(ctx):  # type: ignore[no-untyped-def]
        import faulthandler
        import io
        import subprocess

        print("first")
        for each in (b"caf\xc3", b"\xa9\n", bytearray(b"\xff\n")):
            assert sys.stdout.buffer.write(each) == len(each)
        sys.stdout.reconfigure(line_buffering=True)
        wrapped = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
        wrapped.write("wrapped\n")
        del wrapped
        print("last")
        subprocess.run(["echo", "of a child"], stdout=sys.stdout, check=True)
        faulthandler.enable(sys.stderr)

    clusters(1).run(talk)
    lines = [line.removeprefix("[rank 0] ") for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line != "of a child"] == ["first", "café", "\ufffd", "wrapped", "last"]
    assert "of a child" in lines


@pytest.mark.parametrize("how", ["returns", "raises", "exits"])
def test_a_forked_child_that_comes_back_does_not_answer_for_its_parent(
    clusters: Callable[[int], mk.Cluster], how: str
) -> None:
    def fork(ctx):  # type: ignore[no-untyped-def]
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if how == "raises":
            raise RuntimeError("the child's own")
        if how == "exits":
            sys.exit(3)
        return "the child's"

    assert clusters(2).run(fork) == [{"returns": 0, "raises": 1, "exits": 3}[how]] * 2


def test_another_program_does_not_take_a_ranks_place(clusters: Callable[[int], mk.Cluster]) -> None:
    with pytest.raises(mk.RankFailed, match=r"rank 1 of 2 left with exit code 0 .* exec\b.*subprocess.run"):
        clusters(2).run(lambda ctx: os.execl("/bin/true", "true") if ctx.rank else ctx.comm.barrier())
    spawned = clusters(2).run(lambda ctx: os.spawnlp(os.P_WAIT, "true", "true"))
    assert spawned == [0, 0]


END = """
import atexit, multiprocessing, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
folder, how = sys.argv[1:]
def note(name):
    open(os.path.join(folder, name + os.environ["RANK"]), "x").close()
def late(name):
    threading.main_thread().join(0.2)  # the script has ended
    note(name)
def later(name):
    while not os.path.exists(os.path.join(folder, "thread" + os.environ["RANK"])):
        time.sleep(0.01)
    note(name)
atexit.register(note, "atexit")
threading.Thread(target=late, args=["thread"]).start()
ThreadPoolExecutor(1).submit(note, "pool")
multiprocessing.get_context("fork").Process(target=later, args=["process"], daemon=how == "_exit").start()
if how == "_exit":
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["falls off its end", "_exit"])
def test_a_watched_program_ends_as_python_ends_it(
    clusters: Callable[[int], mk.Cluster], tmp_path: Path, how: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(END)
    clusters(2).run(CommandProgram(str(program), (str(tmp_path), how)).run, watch=True)
    noted = {path.name for path in tmp_path.iterdir()} - {"program.py"}
    if how == "_exit":  # which waits for nothing
        assert not any(name.startswith("atexit") for name in noted)
    else:
        assert noted == {
            f"{name}{rank}" for name in ("atexit", "thread", "pool", "process") for rank in (0, 1)
        }
