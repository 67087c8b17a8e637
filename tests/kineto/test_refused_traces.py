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
    "ts='x'": GOOD | {"ts": "x"},
    "ts=1e18": GOOD | {"ts": 1e18},
    "dur=-1": GOOD | {"dur": -1},
    "correlation=2^64": GOOD | {"cat": "kernel", "args": {"correlation": 2**64}},
    "Bytes=1e300": memory(Bytes=1e300),
    "nelems": GOOD | {"name": "record_param_comms", "args": SENT | {"In msg nelems": 1e300}},
    "ranks": GOOD | {"name": "record_param_comms", "args": SENT | {"Process Group Ranks": 7}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_event_that_no_tool_writes(tmp_path: Path, what: str) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": [GOOD, REFUSED[what]]}))
    with pytest.raises(TraceError, match=r"rank0\.json: event 1 \(.*\) cannot be read: .*It is \{'ph'"):
        mk.open(path)


BOMBS: dict[str, tuple[bytes, str]] = {
    "nesting": (b'{"traceEvents": [' + b"[" * 100_000, "nested too deeply: .* at character"),
    "zeros": (gzip.compress(b"[" + b" " * (200 << 20), 1), "no text shrinks as much"),
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
