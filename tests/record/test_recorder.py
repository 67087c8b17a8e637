"""The recorder: what is written, and when."""

import math
from pathlib import Path

import pytest

from mpkit.record.recorder import Recorder
from mpkit.trace import Kind, Trace, read_rank


def test_ops_are_written_open_and_then_ended(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    index = record.begin(Kind.FORWARD, "F", stage=1, microbatch=2, flops=3.0, nbytes=4)
    (op,) = read_rank(tmp_path, 0).ops
    assert (op["kind"], op["stage"], op["microbatch"], op["end"]) == (Kind.FORWARD, 1, 2, 0)
    assert record.current == (None, 1, 2)
    record.end(index)
    record.close("finished")
    rank = read_rank(tmp_path, 0)
    (op,) = rank.ops
    assert 0 < op["start"] <= op["end"]
    assert op["cpu"] > 0
    assert (op["flops"], op["bytes"], rank.name(op["name"])) == (3.0, 4, "F")
    assert rank.state == "finished"


def test_steps_and_losses(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    for number in range(2):
        with record.step(number):
            with record.span("mine"):
                pass
            if number:
                record.loss(0.5)
    record.close("failed")
    rank = Trace.load(tmp_path).ranks[0]
    assert [Kind(k).word for k in rank.ops["kind"]] == ["step", "compute"] * 2
    assert list(rank.ops["step"]) == [0, 0, 1, 1]
    assert math.isnan(rank.ops["value"][0])
    assert rank.ops["value"][2] == 0.5
    assert rank.state == "failed"
    with pytest.raises(ValueError, match="no step is under way"):
        record.loss(1.0)
