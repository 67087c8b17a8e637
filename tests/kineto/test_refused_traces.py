"""Chrome traces that no tool writes: refused with the file, the event's number and the reason."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import mpkit as mk
from mpkit.errors import TraceError

BOMBS: dict[str, tuple[bytes, str]] = {
    "nesting": (b'{"traceEvents": [' + b"[" * 100_000, "nested too deeply: .* at character"),
    "zeros": (gzip.compress(b"[" + b" " * (200 << 20), 1), "no text shrinks as much"),
    "shape": (
        b'[{"ph":"X","cat":"cpu_op","name":"record_param_comms","ts":1,"args":{"Input Dims":[{"a":1}]}}]',
        "event 0 cannot be read: could not convert string to float: 'a'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BOMBS)
def test_bombs(tmp_path: Path, what: str) -> None:
    data, says = BOMBS[what]
    path = tmp_path / ("bomb.json.gz" if data[:2] == b"\x1f\x8b" else "bomb.json")
    path.write_bytes(data)
    with pytest.raises(TraceError, match=rf"bomb\.json.*{says}"):
        mk.open(path)
