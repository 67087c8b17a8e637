"""What ranks print: all of it up to the limit, in about as much time as it takes to print it."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

import mpkit as mk
from mpkit.launch.process.output import OutputReader, labelled_output


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
