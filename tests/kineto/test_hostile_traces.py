"""Chrome traces that no tool writes: refused with the file, the event's number and the reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import mpkit as mk
from mpkit.errors import TraceError

GOOD = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0, "args": {}}
SENT = {"Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float", "Process Group Ranks": "[0, 1]"}


def memory(**args: Any) -> dict[str, Any]:
    return {"ph": "i", "name": "[memory]", "ts": 1, "args": args}


REFUSED: dict[str, dict[str, Any]] = {
    "args=[]1": GOOD | {"args": [1]},
    "ts=[]": GOOD | {"ts": [1]},
    "ts=nan": GOOD | {"ts": float("nan")},
    "ts='x'": GOOD | {"ts": "x"},
    "ts=1e18": GOOD | {"ts": 1e18},
    "dur=inf": GOOD | {"dur": float("inf")},
    "dur=-1": GOOD | {"dur": -1},
    "dur={}": GOOD | {"dur": {"a": 1}},
    "correlation='x'": GOOD | {"cat": "kernel", "args": {"correlation": "x"}},
    "correlation=2^64": GOOD | {"cat": "kernel", "args": {"correlation": 2**64}},
    "External id=inf": GOOD | {"args": {"External id": float("inf")}},
    "bytes=[]": GOOD | {"cat": "gpu_memcpy", "args": {"bytes": [1]}},
    "Bytes='x'": memory(Bytes="x"),
    "Bytes=1e300": memory(Bytes=1e300),
    "args=1": memory() | {"args": 1},
    "nelems": GOOD | {"name": "record_param_comms", "args": SENT | {"In msg nelems": 1e300}},
    "dims": GOOD | {"name": "record_param_comms", "args": SENT | {"Input Dims": [[2**40, 2**40]]}},
    "shape": GOOD | {"name": "c10d::allreduce_", "args": {"Input Dims": [["x"]]}},
    "ranks": GOOD | {"name": "record_param_comms", "args": SENT | {"Process Group Ranks": 7}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_event_that_no_tool_writes(tmp_path: Path, what: str) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": [GOOD, REFUSED[what]]}))
    with pytest.raises(TraceError, match=r"rank0\.json: event 1 \(.*\) cannot be read: .*It is \{'ph'"):
        mk.open(path)


@pytest.mark.parametrize(
    "event",
    [
        GOOD | {"cat": ["cpu_op"]},
        GOOD | {"pid": [1], "tid": {"a": 1}},
        GOOD | {"name": 7},
        GOOD | {"cat": "user_annotation", "name": "ProfilerStep#99999999999999999999"},
        GOOD | {"cat": "user_annotation", "name": "PP:2F1e18"},
        GOOD | {"cat": "user_annotation", "name": "PP:99999F99999999999"},
        {"ph": "E", "pid": 3, "ts": 1},
        {"ph": ["X"]},
    ],
)
def test_an_event_that_means_nothing_is_no_more_than_a_name(tmp_path: Path, event: dict[str, Any]) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": [GOOD, event]}))
    assert mk.open(path).world_size == 1


HEADERS: dict[str, Any] = {
    "distributedInfo": {
        "rank": float("inf"),
        "world_size": float("inf"),
        "pg_config": [{"ranks": [-1, 10**9]}, 7],
    },
    "deviceProperties": "[" * 100_000,
    "baseTimeNanoseconds": None,
}


def test_a_header_that_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [GOOD], **HEADERS}))
    assert mk.open(path).world_size == 1
    path.write_text(json.dumps({"traceEvents": [GOOD], "baseTimeNanoseconds": [1]}))
    with pytest.raises(TraceError, match=r"trace\.json: baseTimeNanoseconds=\[1\] is no number"):
        mk.open(path)
    path.write_text(json.dumps([GOOD, GOOD | {"ts": 8e15}]))
    with pytest.raises(TraceError, match="which no run takes"):
        mk.open(path)


BOMBS: dict[str, tuple[bytes, str]] = {
    "nesting": (b'{"traceEvents": [' + b"[" * 100_000, "nested too deeply: .* at character"),
    "nesting beside": (b'{"a": ' + b'{"a":' * 100_000, "nested too deeply"),
    "zeros": (gzip.compress(b"[" + b" " * (200 << 20), 1), "no text shrinks as much"),
    "events": (gzip.compress(b"[" + b'{"ph":"M","name":"%s"},' % (b"x" * 5000) * 20_000), "no text shrinks as much"),
    "members": (gzip.compress(b"[") + gzip.compress(b" " * (1 << 20)) * 100, "no text shrinks as much"),
    "no JSON": (b"[" + b'{"ph":x},' * 1000, "more than 20 events are no JSON"),
    "header": (b"{" + b'"a":"%s",' % (b"x" * 5_000_000) * 8, "more than 33,554,432 characters beside its events"),
    "open spans": (b"[" + b'{"ph":"B","ts":1},' * 100_001 + b"{}]", "event 100,000 .*spans are open"),
    "processes": (
        json.dumps([{"ph": "X", "pid": pid, "ts": 1, "dur": 1} for pid in range(70_000)]).encode(), "70,000 processes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BOMBS)
def test_bombs(tmp_path: Path, what: str) -> None:
    data, says = BOMBS[what]
    path = tmp_path / ("bomb.json.gz" if data[:2] == b"\x1f\x8b" else "bomb.json")
    path.write_bytes(data)
    with pytest.raises(TraceError, match=rf"bomb\.json.*{says}"):
        mk.open(path)


def test_a_name_longer_than_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([{"ph": "X", "name": "a", "pid": "x" * 5000, "ts": 1, "dur": 1}]))
    mk.open(path).timeline().to_svg()
    lines = str(mk.open(path).timeline()).splitlines()
    assert max(len(line) for line in lines if "xxx..." in line) <= 200
