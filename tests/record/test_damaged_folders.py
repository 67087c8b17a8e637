"""The folder of a run on a disk that failed: what a finished rank wrote is checked, and a lost page is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpkit.errors import TraceError
from mpkit.trace import HEADER, OP, Kind, Trace, files
from mpkit.trace.record.recorder import Recorder

STEPS = 100


def record(folder: Path, *, finish: bool) -> list[float]:
    recorder = Recorder(folder, 0)
    losses = [1.0 / (1 + step) for step in range(STEPS)]
    for step, loss in enumerate(losses):
        with recorder.step(step):
            recorder.ledger.change(("params", 100))
            recorder.end(recorder.begin(Kind.FORWARD, f"layer {step}", microbatch=0))
            recorder.loss(loss)
    if finish:
        recorder.close("finished")
    return losses


def test_a_rank_that_ends_while_its_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op ends, and the rank with it, between the reader's look at the records and at what checks them."""
    recorder = Recorder(tmp_path, 0)
    op = recorder.begin(Kind.FORWARD, "layer", microbatch=0)
    copied = np.array

    def copied_and_then_ended(values: Any) -> Any:
        monkeypatch.undo()
        copy = copied(values)
        recorder.end(op)
        recorder.close("finished")
        return copy

    monkeypatch.setattr(files.np, "array", copied_and_then_ended)
    assert Trace.load(tmp_path).ranks[0].ops["end"].tolist() == [0]
    assert Trace.load(tmp_path).ranks[0].ops["end"][0] > 0


@pytest.mark.parametrize("page", range(1, 5))
def test_a_page_that_a_killed_run_lost(tmp_path: Path, page: int) -> None:
    losses = record(tmp_path, finish=False)
    path = tmp_path / "rank0.ops"
    data = bytearray(path.read_bytes())
    end = HEADER.itemsize + 2 * STEPS * OP.itemsize
    data[4096 * page : 4096 * (page + 1)] = bytes(4096)
    path.write_bytes(data)
    if 4096 * (page + 1) < end:
        with pytest.raises(TraceError, match=r"rank0\.ops is damaged: record number \d+ is empty"):
            Trace.load(tmp_path)
        return
    read = Trace.load(tmp_path)  # the last page never came to the disk: the run as it was before
    assert 0 < len(read.losses) < STEPS
    assert read.losses == losses[: len(read.losses)]


def test_a_trace_of_no_such_number_of_ranks(tmp_path: Path) -> None:
    import json
    import zipfile

    for ranks in (-1, 10**9, "2", None, True):
        with zipfile.ZipFile(tmp_path / "x.trace", "w") as archive:
            archive.writestr("mpkit.json", json.dumps({"version": 2, "ranks": ranks, "meta": {}}))
        with pytest.raises(TraceError, match=r"x\.trace"):
            Trace.load(tmp_path / "x.trace")
