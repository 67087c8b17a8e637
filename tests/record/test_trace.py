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

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpkit.errors import TraceError
from mpkit.trace import HEADER, MEMORY, OP, Kind, Lane, RankTrace, Trace, lane_of
from mpkit.trace.record.recorder import Recorder


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
    RankTrace,
    records_of(OP),
    records_of(MEMORY),
    st.lists(st.text()),
    st.sampled_from(["running", "finished", "failed"]),
)
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
