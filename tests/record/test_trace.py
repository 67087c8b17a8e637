"""The Trace: what is saved is loaded, and what is broken says so."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.errors import TraceError
from mpkit.timeline.timeline import Timeline
from mpkit.trace import HEADER, MEMORY, OP, Kind, Lane, RankTrace, Trace, files, lane_of, read_rank
from mpkit.trace.record.recorder import Recorder
from mpkit.views.timeline.svg import svg


def records_of(dtype: np.dtype) -> st.SearchStrategy[np.ndarray]:
    """Arrays of any records whatever, bit for bit."""
    size = dtype.itemsize
    return st.integers(0, 5).flatmap(
        lambda n: st.binary(min_size=n * size, max_size=n * size).map(lambda b: np.frombuffer(b, dtype))
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
rank_traces = st.builds(
    RankTrace, records_of(OP), records_of(MEMORY), st.lists(st.text()),
    st.sampled_from(["running", "finished", "failed"]),
)  # fmt: skip
traces = st.builds(
    Trace, st.lists(rank_traces, max_size=3), st.dictionaries(st.text(), json_values, max_size=3)
)


def assert_same(one: Trace, other: Trace) -> None:
    assert one.meta == other.meta
    assert one.world_size == other.world_size
    for a, b in zip(one.ranks, other.ranks, strict=True):
        assert a.ops.tobytes() == b.ops.tobytes()
        assert a.memory.tobytes() == b.memory.tobytes()
        assert (a.names, a.state) == (b.names, b.state)


def recorded(folder: Path, ops: int = 10) -> Trace:
    """A rank's folder with a step of that many ops."""
    folder.mkdir(exist_ok=True)
    (folder / "meta.json").write_text(json.dumps({"world_size": 1, "device": "cpu"}))
    record = Recorder(folder, 0)
    with record.step(0):
        for number in range(ops):
            record.ledger.change(("params", number))
            record.end(record.begin(Kind.FORWARD, f"op {number}", microbatch=number))
    record.close("finished")
    return Trace.load(folder)


@pytest.mark.slow
@given(traces)
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("trace") / "a.mpk"
    assert trace.save(path) == path
    assert_same(Trace.load(path), trace)


def test_the_header_and_record_sizes_are_the_format() -> None:
    assert (HEADER.itemsize, OP.itemsize, MEMORY.itemsize) == (64, 88, 24)
    assert [lane_of(k) for k in (Kind.WAIT, Kind.SEND, Kind.COPY_TO_HOST, Kind.STEP, Kind.DATA)] == list(Lane)


def archive_with(path: Path, ops: bytes, version: int = 1) -> Path:
    """A trace of one rank with this content for its ops."""
    memory = io.BytesIO()
    np.save(memory, np.empty(0, MEMORY))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mpkit.json", json.dumps({"version": version, "ranks": 1, "meta": {}}))
        archive.writestr("rank0.json", json.dumps({"names": [""], "state": "finished"}))
        archive.writestr("rank0.ops.npy", ops)
        archive.writestr("rank0.mem.npy", memory.getvalue())
    return path


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def test_a_later_version_says_what_to_do(tmp_path: Path) -> None:
    path = archive_with(tmp_path / "a.mpk", npy(np.empty(0, OP)), version=3)
    with pytest.raises(TraceError, match="pip install --upgrade mpkit"):
        Trace.load(path)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    path = archive_with(tmp_path / "a.mpk", npy(np.array([Trap(sprung)], dtype=object)))
    with pytest.raises(TraceError, match="Object arrays cannot be loaded"):
        Trace.load(path)
    assert not sprung.exists()


def test_a_ranks_file_cut_anywhere_gives_the_whole_records(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "run", 3)
    content = {part: (tmp_path / "run" / f"rank0.{part}").read_bytes() for part in ("ops", "mem", "names")}
    cut = tmp_path / "cut"
    cut.mkdir()
    for part, size in (("ops", OP.itemsize), ("mem", MEMORY.itemsize), ("names", 0)):
        for other, data in content.items():
            (cut / f"rank0.{other}").write_bytes(data)
        for length in range(len(content[part])):
            (cut / f"rank0.{part}").write_bytes(content[part][:length])
            (rank,) = Trace.load(cut).ranks
            there = max(0, length - HEADER.itemsize) // size if size else 0
            if part == "ops":
                assert rank.ops.tobytes() == whole.ranks[0].ops[:there].tobytes()
            elif part == "mem":
                assert rank.memory.tobytes() == whole.ranks[0].memory[:there].tobytes()
            else:
                assert rank.names == whole.ranks[0].names[: max(1, content[part][:length].count(b"\n"))]
                assert {rank.name(int(op["name"])) for op in rank.ops} <= {*whole.ranks[0].names, "?"}


def test_an_all_to_all_is_read_with_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a reader that the rank overtakes between two of its files."""
    recorder, read = Recorder(tmp_path, rank=0), files._read_records

    def read_while_it_records(*which: Any) -> Any:
        recorder.note_parts(recorder.begin(Kind.ALL_TO_ALL, group="0,1"), [8, 16])
        return read(*which)

    monkeypatch.setattr(files, "_read_records", read_while_it_records)
    rank = read_rank(tmp_path, 0)
    recorder.close("finished")
    assert len(rank.ops) and set(rank.sent_parts["op"].tolist()) == set(range(len(rank.ops)))


def test_losses_come_from_whoever_knows_them(tmp_path: Path) -> None:
    known = ({0: 2.0, 1: 1.0}, {1: 9.0, 2: 0.5, 3: math.nan})
    for rank, losses in enumerate(known):
        record = Recorder(tmp_path, rank)
        for step in range(4):
            with record.step(step):
                if step in losses:
                    record.loss(losses[step])
        record.close("finished")
    losses = Trace.load(tmp_path).losses
    assert losses[:3] == [2.0, 1.0, 0.5]
    assert len(losses) == 4
    assert math.isnan(losses[3])
    assert Trace([]).losses == []


RECORDS_FOR_EVER = """
import os, sys, pathlib
from mpkit.trace.record.recorder import Recorder
from mpkit.trace import Kind
record = Recorder(pathlib.Path(sys.argv[1]), 0)
number = 0
while True:
    index = record.begin(Kind.FORWARD, f"op {number}", microbatch=number)
    record.ledger.change(("activations", 1))
    record.end(index)
    number += 1
    if number % 100 == 0:
        os.write(1, b"%d\\n" % number)
"""


def test_a_killed_rank_loses_nothing_it_recorded(tmp_path: Path) -> None:
    lines = 50
    child = subprocess.Popen([sys.executable, "-c", RECORDS_FOR_EVER, tmp_path], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        for _ in range(lines):
            said = child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        said = (said + child.stdout.read()).splitlines()[-1]
    assert child.returncode == -signal.SIGKILL
    (rank,) = Trace.load(tmp_path).ranks
    assert rank.state == "running"
    assert len(rank.ops) >= int(said) >= 100 * lines
    assert len(rank.memory) >= len(rank.ops) - 1
    assert [rank.name(n) for n in rank.ops["name"]] == [f"op {n}" for n in range(len(rank.ops))]
    assert (rank.ops["end"][:-1] >= rank.ops["start"][:-1]).all()


# ---- Traces that somebody made up, or a disk damaged: a sentence, in bounded time and memory, and never a raw error.


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
