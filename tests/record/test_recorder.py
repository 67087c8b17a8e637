"""The recorder: what is written, and when."""

import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpkit.trace import HEADER, MEMORY, OP, Kind, Lane, Trace, read_rank
from mpkit.trace.record.recorder import Recorder


@pytest.fixture
def record(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path, 0)


def test_ops_are_written_open_and_then_ended(tmp_path: Path, record: Recorder) -> None:
    index = record.begin(Kind.FORWARD, "F", stage=1, microbatch=2, flops=3.0, nbytes=4)
    (op,) = read_rank(tmp_path, 0).ops
    assert (op["kind"], op["stage"], op["microbatch"], op["end"], op["cpu"]) == (Kind.FORWARD, 1, 2, 0, 0)
    assert record.current == (None, 1, 2)
    record.end(index)
    record.close("finished")
    rank = read_rank(tmp_path, 0)
    (op,) = rank.ops
    assert 0 < op["start"] <= op["end"]
    assert op["cpu"] > 0
    assert (op["flops"], op["bytes"], op["step"], op["value"]) == (3.0, 4, -1, 0.0)
    assert rank.name(op["name"]) == "F"
    assert rank.state == "finished"


def test_every_column_lands_where_the_format_says(tmp_path: Path, record: Recorder) -> None:
    before = time.monotonic_ns()
    index = record.begin(
        Kind.SEND, "x", stage=-1, microbatch=7, nbytes=2**40, group="0>1#2", number=3, peer=1, ref=5, where="a.py:1"
    )  # fmt: skip
    record.end(index)
    rank = read_rank(tmp_path, 0)
    (op,) = rank.ops
    columns = {name: op[name].item() for name in OP.names or ()}
    assert before <= columns.pop("start") <= columns.pop("end") <= time.monotonic_ns()
    assert [rank.name(columns.pop(c)) for c in ("name", "where", "group")] == ["x", "a.py:1", "0>1#2"]
    assert columns == {
        "kind": Kind.SEND, "lane": Lane.COMM, "depth": 0, "flags": 0, "stage": -1, "pad": 0, "microbatch": 7,
        "step": -1, "number": 3, "peer": 1, "ref": 5, "cpu": 0, "bytes": 2**40, "flops": 0.0, "value": 0.0,
    }  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "end", "drop", "send"]), st.integers(0, 30)), max_size=30)
)
def test_any_order_of_beginnings_and_ends(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, int]]
) -> None:
    """Ends in any order, twice, or never: what is open is a stack, and nothing that ended is touched again."""
    folder = tmp_path_factory.mktemp("run")
    record = Recorder(folder, 0)
    stack: list[int] = []
    sends: set[int] = set()
    ended: set[int] = set()
    depths: list[int] = []
    for call, number in calls:
        index = number % len(depths) if depths else -1
        if call == "begin":
            depths.append(len(stack))
            stack.append(record.begin(Kind.FORWARD, microbatch=len(depths) - 1))
        elif call == "send":
            depths.append(0)
            sends.add(record.begin(Kind.SEND))
        elif call == "drop":
            record.drop(index)
            stack = stack[: stack.index(index)] if index in stack else stack
        else:
            record.end(index)
            if index in stack:
                ended |= set(stack[stack.index(index) :])
                stack = stack[: stack.index(index)]
            ended |= {index} & sends
        assert record.busy == bool(stack)
        if stack:
            assert record.current.microbatch == stack[-1]
    ops = read_rank(folder, 0).ops
    assert list(ops["depth"]) == depths
    assert set(np.flatnonzero(ops["end"])) == ended
    record.close("finished")


def test_steps_and_losses(tmp_path: Path, record: Recorder) -> None:
    for number in range(2):
        with record.step(number):
            with record.span("mine"):
                pass
            if number:
                record.loss(0.5)
    with pytest.raises(ValueError, match="no step is under way"):
        record.loss(1.0)
    with pytest.raises(ValueError, match="numbered from 0"), record.step(-1):
        pass
    record.close("failed")
    rank = Trace.load(tmp_path).ranks[0]
    assert [Kind(k).word for k in rank.ops["kind"]] == ["step", "compute"] * 2
    assert list(rank.ops["step"]) == [0, 0, 1, 1]
    assert list(rank.ops["depth"]) == [0, 0, 0, 0]
    assert math.isnan(rank.ops["value"][0])
    assert rank.ops["value"][2] == 0.5
    assert rank.state == "failed"


def test_what_failed_stays_open_and_current_says_where(tmp_path: Path, record: Recorder) -> None:
    with pytest.raises(ZeroDivisionError), record.step(1):
        record.begin(Kind.FORWARD, stage=0, microbatch=5)
        with record.span("inner"):
            _ = 1 / 0
    assert record.current == (1, 0, 5)
    assert not read_rank(tmp_path, 0).ops["end"].any()


def test_files_grow_past_their_first_capacity_and_shrink_to_what_is_used(
    tmp_path: Path, record: Recorder
) -> None:
    first = record.begin(Kind.STEP, "around all growth")
    for number in range(20_000):
        record.end(record.begin(Kind.FORWARD, "f", microbatch=number))
        record.ledger.change(("grads", 1))
    record.end(first)
    record.close("finished")
    rank = read_rank(tmp_path, 0)
    assert list(rank.ops["microbatch"]) == [-1, *range(20_000)]
    assert rank.ops["end"].all()
    assert list(rank.memory["op"]) == list(range(2, 20_002))
    assert (tmp_path / "rank0.ops").stat().st_size == HEADER.itemsize + 20_001 * OP.itemsize
    assert (tmp_path / "rank0.mem").stat().st_size == HEADER.itemsize + 20_000 * MEMORY.itemsize


FORKS = """
import os, pathlib, sys, torch
from mpkit.trace.record.recorder import Recorder
from mpkit.trace import Kind
record = Recorder(pathlib.Path(sys.argv[1]), 0)
held = torch.zeros(100)
record.ledger.track(held, "buffers")
around = record.begin(Kind.FORWARD, "parent")
child = os.fork()
if not child:
    del held
    record.end(around)
    for _ in range(9000):
        record.end(record.begin(Kind.FORWARD, "child"))
    record.close("failed")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
record.end(record.begin(Kind.SEND, "after"))
os._exit(0)
"""


@pytest.mark.slow
def test_a_forked_child_writes_nothing_into_its_parents_files(tmp_path: Path) -> None:
    """A DataLoader's workers are forked from a rank, and let go of its tensors when they end."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS, tmp_path], check=True)
    rank = read_rank(tmp_path, 0)
    assert [rank.name(n) for n in rank.ops["name"]] == ["parent", "after"]
    assert list(rank.ops["end"] > 0) == [False, True]
    assert list(rank.memory["delta"]) == [400]
    assert rank.state == "running"
