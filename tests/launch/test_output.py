"""What ranks print, and how programs end on them."""

import io
import os
import sys
from pathlib import Path

import pytest

import mpkit as mk
from mpkit.cli.watch import CommandProgram
from mpkit.launch.process.output import OutputReader, labelled_output
from tests.serial import Clusters

# ---- What ranks print: all of it up to the limit, in about as much time as it takes to print it.


def test_nothing_is_lost_at_the_end(cluster: mk.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines without an end, of Python, C code and children, many short prints, and nearly as much as is allowed."""

    def talk(ctx):  # type: ignore[no-untyped-def]
        for _ in range(95):
            print("x" * 100_000)
        if ctx.rank == 0:
            for _ in range(300_000):
                print(".", end="")
            os.system("printf 'a child'")
            os.write(2, b"C code, ")
        print("last words", end="")

    cluster.run(talk)
    lines = capsys.readouterr().out.splitlines()
    for rank in range(4):
        assert lines.count(f"[rank {rank}] " + "x" * 100_000) == 95
    assert sorted(line for line in lines if "x" not in line) == [
        "[rank 0] " + "." * 300_000 + "last words",
        "[rank 0] a childC code, ",
        *(f"[rank {rank}] last words" for rank in (1, 2, 3)),
    ]


def test_lines_stay_whole_however_they_are_written(tmp_path: Path) -> None:
    log = os.open(tmp_path / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    reader = OutputReader(tmp_path, 2)
    one, other = labelled_output(tmp_path, 0, 1), labelled_output(tmp_path, 1, 1)
    one.write("in ")
    other.write("whole\n")
    assert list(reader.lines()) == ["[rank 1] whole"]
    one.write("pieces\r\nthe next")
    one.buffer.write(" in bytes: \u00e9".encode()[:-1])
    one.buffer.write("\u00e9".encode()[-1:] + b"\n")
    assert list(reader.lines()) == ["[rank 0] in pieces", "[rank 0] the next in bytes: \u00e9"]
    one.write("\r10 %")
    one.write("\r20 %")  # a progress bar
    assert list(reader.lines()) == ["[rank 0] ", "[rank 0] 10 %"]
    io.TextIOWrapper(one.buffer).close()  # as programs do that want another encoding
    one.write(" done\n")
    os.write(log, b"[rank 1] cut by a sig")
    assert list(reader.lines()) == ["[rank 0] 20 % done"]
    assert list(reader.lines(last=True)) == ["[rank 1] cut by a sig"]
    os.close(log)


def test_output_that_cannot_be_shown(cluster: mk.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks go on; who fails is told no more."""
    taken = []

    def sink(line: str) -> None:
        taken.append(line)
        raise OSError(28, "No space left on device")

    launch = cluster.launch(lambda ctx: print(ctx.rank) or ctx.rank, (), sink=sink)
    launch.finish()
    assert launch.results() == [0, 1, 2, 3]
    assert len(taken) == 1
    assert "what the ranks print cannot be shown any more (OSError: [Errno 28]" in capsys.readouterr().err


# ---- What programs do on ranks as they would anywhere: bytes, forks, threads that outlive the script, their own exits.


def test_bytes_and_files_of_the_standard_output(
    clusters: Clusters, capsys: pytest.CaptureFixture[str]
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


def test_a_forked_child_that_comes_back_does_not_answer_for_its_parent(clusters: Clusters) -> None:
    def fork(ctx):  # type: ignore[no-untyped-def]
        codes = []
        for how in ("returns", "raises", "exits"):
            if child := os.fork():
                codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            elif how == "raises":
                raise RuntimeError("the child's own")
            else:
                return sys.exit(3) if how == "exits" else "the child's"
        return codes

    assert clusters(2).run(fork) == [[0, 1, 3]] * 2


def test_another_program_does_not_take_a_ranks_place(clusters: Clusters) -> None:
    with pytest.raises(mk.RankFailed, match=r"rank 1 of 2 left with exit code 0 .* exec\b.*subprocess.run"):
        clusters(2).run(lambda ctx: os.execl("/bin/true", "true") if ctx.rank else ctx.comm.barrier())
    spawned = clusters(2).run(lambda ctx: os.spawnlp(os.P_WAIT, "true", "true"))
    assert spawned == [0, 0]


END = """
import atexit, multiprocessing, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
folder = sys.argv[1]
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
multiprocessing.get_context("fork").Process(target=later, args=["process"]).start()
"""


def test_a_watched_program_ends_as_python_ends_it(clusters: Clusters, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(END)
    clusters(2).run(CommandProgram(str(program), (str(tmp_path),)).run, watch=True)
    noted = {path.name for path in tmp_path.iterdir()} - {"program.py"}
    assert noted == {f"{name}{rank}" for name in ("atexit", "thread", "pool", "process") for rank in (0, 1)}
