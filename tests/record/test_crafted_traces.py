"""Traces that somebody made up, or a disk damaged: a sentence, in bounded time and memory, and never a raw error."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import mpkit as mk
from mpkit.errors import TraceError
from mpkit.timeline.timeline import Timeline
from mpkit.trace import HEADER, MEMORY, OP, Kind, Trace
from mpkit.trace.record.recorder import Recorder
from mpkit.views.timeline.svg import svg


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Of two ranks that computed, sent a message, and reduced, in two steps."""
    folder = tmp_path_factory.mktemp("run")
    for rank in range(2):
        record = Recorder(folder, rank)
        for step in range(2):
            with record.step(step):
                record.ledger.change(("params", 100))
                record.end(record.begin(Kind.FORWARD, "layer", microbatch=0))
                message = (Kind.SEND, Kind.RECV)[rank]
                record.end(record.begin(message, "0>1#a", number=step, peer=1 - rank, nbytes=8))
                record.end(record.begin(Kind.ALL_REDUCE, "0,1", number=step, nbytes=8))
                record.loss(1.0)
        record.close("finished")
    (folder / "meta.json").write_text(json.dumps({"world_size": 2, "device": "cpu"}))
    return Trace.load(folder)


METAS: dict[str, Any] = {
    "world_size=100000000": {"world_size": 100_000_000},
    "world_size=None": {"world_size": None},
    "world_size='x'": {"world_size": "x"},
    "first_step=1.5": {"first_step": 1.5},
    "of type list": [],
    "replicas=": {"world_size": 2, "replicas": [[0], ["1"]]},
    "proof={'steps'": {"proof": {"steps": [1], "loss": [None]}},
    "proof={'difference'": {"proof": {"difference": 1, "steps": [1]}},
    "proof=3": {"proof": 3},
    "each of 2 ranks in one": {"world_size": 2, "replicas": [[0]]},
}


@pytest.mark.parametrize("said", METAS)
def test_what_a_trace_says_of_its_run_is_checked(trace: Trace, tmp_path: Path, said: str) -> None:
    (tmp_path / "meta.json").write_text(json.dumps(METAS[said]))
    (tmp_path / "rank0.ops").touch()
    with pytest.raises(TraceError, match=said):
        Trace.load(tmp_path)
    file = tmp_path / "a.mpk"
    trace.save(file)
    if said != "world_size=100000000":
        Trace(trace.ranks, METAS[said]).save(file)
        with pytest.raises(TraceError, match=said):
            Trace.load(file)


def test_what_is_no_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    for name in ("rank0.ops", "rank0.mem", "rank0.names", "meta.json", "a.mpk"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(TraceError, match="neither a file nor a folder"):
        Trace.load(tmp_path / "a.mpk")
    assert len(Trace.load(tmp_path)) == 0
    (tmp_path / "rank900000000.ops").touch()
    with pytest.raises(TraceError, match="a file of rank 900,000,000"):
        Trace.load(tmp_path)


@pytest.mark.parametrize("member", ["mpkit.json", "rank0.ops.npy", "nothing"])
def test_an_archive_that_unpacks_to_a_thousand_times_its_size(tmp_path: Path, member: str) -> None:
    memory = io.BytesIO()
    np.save(memory, np.empty(0, MEMORY))
    content = {
        "mpkit.json": json.dumps({"version": 1, "ranks": 1, "meta": {}}).encode(),
        "rank0.json": b'{"names": [""], "state": "finished"}',
        "rank0.ops.npy": memory.getvalue(),
        "rank0.mem.npy": memory.getvalue(),
        member: b'"' + bytes(100_000_000) + b'"',
    }
    path = tmp_path / "a.mpk"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    with pytest.raises(TraceError, match="no trace shrinks as much"):
        Trace.load(path)


def test_names_are_only_read(tmp_path: Path) -> None:
    odd = "layer\x1b[2J\x00\ud800\u202e<script>\x9b"
    record = Recorder(tmp_path, 0)
    with record.step(0):
        record.end(record.begin(Kind.FORWARD, odd))
    record.close("finished")
    timeline = Timeline.of(Trace.load(tmp_path))
    both = mk.compare(**{odd: timeline, "b": timeline})
    drawn = (svg(timeline, title=odd), timeline.to_svg(), both.to_svg())
    for text in (*drawn, str(timeline), str(both)):
        assert not set(text) & set("\x1b\x00\x9b\ud800\u202e")
    for text in drawn:
        ElementTree.fromstring(text)
        assert "<script>" not in text
    assert any("\\x1b[2J" in name for name in timeline.names)
    timeline.to_html(tmp_path / "a.html")
    assert "<script>\\" not in (tmp_path / "a.html").read_text()


STEPS = 100


def killed(folder: Path) -> list[float]:
    """The losses of a rank that recorded so many steps and never ended."""
    recorder = Recorder(folder, 0)
    losses = [1.0 / (1 + step) for step in range(STEPS)]
    for step, loss in enumerate(losses):
        with recorder.step(step):
            recorder.ledger.change(("params", 100))
            recorder.end(recorder.begin(Kind.FORWARD, f"layer {step}", microbatch=0))
            recorder.loss(loss)
    return losses


@pytest.mark.parametrize("page", range(1, 5))
def test_a_page_that_a_killed_run_lost(tmp_path: Path, page: int) -> None:
    losses = killed(tmp_path)
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
