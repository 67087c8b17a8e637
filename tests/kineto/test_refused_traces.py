"""Chrome traces that no tool writes: refused with the file, the event's number and the reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import mpkit as mk
from mpkit.errors import TraceError

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
