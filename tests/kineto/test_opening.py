"""What `mk.open` takes for a trace: folders, folders of folders, other files, other devices."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpkit as mk
from mpkit.errors import TraceError
from mpkit.timeline.foreign.stream import EventStream
from mpkit.trace import CATEGORIES, Kind
from tests.kineto.program import ddp_program


def span(name: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    place = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "args": {}}
    return {**place, "name": name, "ts": start, "dur": length, **more}


def traced(path: Path, *events: dict[str, Any], **header: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**header, "traceEvents": events or [span("aten::mm", 1, 2)]}))
    return path


def test_a_folder_without_traces_names_the_folders_in_it(tmp_path: Path) -> None:
    for run in ("before", "after"):
        traced(tmp_path / run / "rank0.json")
    with pytest.raises(TraceError, match=r"no trace\. .*; try mk.open\('.*after'\), mk.open\('.*before'\)"):
        mk.open(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"null", b"<!DOCTYPE html><p>404", b"version https://git-lfs.github.com"]
)
def test_a_file_that_is_no_trace_is_shown_by_its_beginning(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(
        TraceError, match=rf"trace\.json begins with b'{re.escape(content.decode())}.*mk.open takes"
    ):
        mk.open(path)


@pytest.mark.parametrize("device", [1, 6, 12, 19])
def test_memory_is_the_accelerators_whichever_it_is(tmp_path: Path, device: int) -> None:
    def held(nbytes: int, kind: int) -> dict[str, Any]:
        args = {"Bytes": nbytes, "Device Type": kind, "Device Id": 0, "Total Allocated": nbytes, "Addr": 1}
        return {"ph": "i", "name": "[memory]", "ts": 1, "pid": 1, "tid": 1, "s": "t", "args": args}

    path = traced(
        tmp_path / "rank0.json", span("aten::mm", 0, 2), held(7000, device), held(10, 0), held(10, 0)
    )
    memory = mk.open(path).ranks[0].memory
    assert memory["delta"].sum() == 7000
    assert set(memory["category"]) == {CATEGORIES.index("buffers")}


def test_streams_that_overlap_leave_no_action_of_negative_length(tmp_path: Path) -> None:
    """A kernel of a forward runs, and ends, while one of the backward before it goes on."""
    events = [
        span("autograd::engine::evaluate_function: MmBackward0", 0, 5, tid=2),
        span("cudaLaunchKernel", 1, 1, cat="cuda_runtime", tid=2, args={"correlation": 1}),
        span("gemm_backward", 25, 40, cat="kernel", args={"device": 0, "stream": 23, "correlation": 1}),
        span("aten::mm", 10, 5),
        span("cudaLaunchKernel", 11, 1, cat="cuda_runtime", args={"correlation": 2}),
        span("gemm_forward", 35, 10, cat="kernel", args={"device": 0, "stream": 7, "correlation": 2}),
    ]
    path = traced(
        tmp_path / "rank0.json", *events, deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    )
    trace = mk.open(path)
    for timeline in (trace.timeline(), trace.timeline("8x-h100-nvlink")):
        spans = timeline.spans
        assert (spans["end"] >= spans["start"]).all()
        assert Kind.BACKWARD in spans["kind"]
    assert np.isfinite(trace.timeline("8x-h100-nvlink").step_time)


@pytest.mark.parametrize("between", ["", "\n", ",\n"])
def test_two_traces_in_one_file_are_rejected(tmp_path: Path, between: str) -> None:
    one = json.dumps(ddp_program(0, 2).json())
    (tmp_path / "both.json").write_text(one + between + json.dumps(ddp_program(1, 2).json()))
    with pytest.raises(TraceError, match="behind its end another trace begins"):
        mk.open(tmp_path / "both.json")


# ---- Reading files that are long, not quite JSON, cut short, or of other tools.


def event(name: str = "aten::mm", **more: Any) -> dict[str, Any]:
    return span(name, 5.5, 2.0, **more)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_events_and_header_come_out_in_any_order(tmp_path: Path) -> None:
    text = json.dumps(
        {"a": [1, {"b": 2}], "traceEvents": [event(), event("aten::add")], "z": "end"}, indent=1
    )
    stream = EventStream(written(tmp_path / "t.json", text))
    assert [each["name"] for each in stream] == ["aten::mm", "aten::add"]
    assert stream.header == {"a": [1, {"b": 2}], "z": "end"}
    assert not +stream.repairs


def test_what_public_tools_mend_is_mended_and_said(tmp_path: Path) -> None:
    broken = json.dumps([event(args={"Process Group Description": "X", "dtype": "Float"}), event("C:PATHx")])
    broken = broken.replace('"X", "dtype"', ', "dtype"').replace("C:PATHx", "C:\\data\\new")
    stream = EventStream(written(tmp_path / "t.json", broken))
    first, second = stream
    assert first["args"] == {"Process Group Description": "", "dtype": "Float"}
    assert second["name"] == "C:\\data\new"
    assert +stream.repairs == {"empty value": 1, "backslash that escapes nothing": 1}


@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_that_was_cut_is_read_as_far_as_it_goes(tmp_path: Path, zipped: bool) -> None:
    whole = json.dumps({"traceEvents": [event(f"aten::op{i}") for i in range(500)]}).encode()
    path = tmp_path / "t.json"
    path.write_bytes(gzip.compress(whole)[:-600] if zipped else whole[:-100])
    stream = EventStream(path)
    found = len(list(stream))
    assert (1 if zipped else 497) <= found < 500
    assert stream.repairs["end that was cut off"] == 1
    trace = mk.open(path)
    assert any("was fixed: end that was cut off (1)" in note for note in trace.notes)


def test_traces_of_other_tools_are_refused_with_who_shows_them(tmp_path: Path) -> None:
    spans = [{"ph": "X", "cat": "own", "name": "outer", "pid": 7, "tid": 1, "ts": 0, "dur": 10}]
    with pytest.raises(
        TraceError, match=r"spans\.json: there are no events .*, but own\. .*perfetto\.dev shows"
    ):
        mk.open(written(tmp_path / "spans.json", json.dumps(spans)))


def test_what_is_no_trace_is_refused_with_what_would_work(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        mk.open(tmp_path / "nothing.json")
    with pytest.raises(TraceError, match="export_chrome_trace"):
        mk.open(tmp_path)
    with pytest.raises(TraceError, match="no events"):
        mk.open(written(tmp_path / "empty.json", "{}"))
    for name in ("a.json", "b.json"):
        written(tmp_path / name, json.dumps({"distributedInfo": {"rank": 3}, "traceEvents": [event()]}))
    with pytest.raises(TraceError, match=r"a\.json, b\.json are all of rank 3"):
        mk.open([tmp_path / "a.json", tmp_path / "b.json"])


# ---- Chrome traces that no tool writes: refused with the file, the event's number and the reason.

BOMBS: dict[str, tuple[bytes, str]] = {
    "nesting": (b'{"traceEvents": [' + b"[" * 100_000, "nested too deeply: .* at character"),
    "zeros": (gzip.compress(b"[" + b" " * (200 << 20), 1), "no text shrinks as much"),
    "shape": (b'[{"ph":"X","cat":"cpu_op","name":"c10d::allreduce_","ts":1,"args":{"Input Dims":[{"a":1}]}}]',
        "event 0 cannot be read: could not convert string to float: 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BOMBS)
def test_bombs(tmp_path: Path, what: str) -> None:
    data, says = BOMBS[what]
    path = tmp_path / ("bomb.json.gz" if data[:2] == b"\x1f\x8b" else "bomb.json")
    path.write_bytes(data)
    with pytest.raises(TraceError, match=rf"bomb\.json.*{says}"):
        mk.open(path)
