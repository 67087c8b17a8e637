"""The parts that uneven all-to-alls send to each rank."""

import struct
from collections.abc import Sequence
from pathlib import Path

from mpkit.trace import SENT_PART
from mpkit.trace.record.files import RecordFile

_PACK = struct.Struct("<IIq").pack


class SentParts:
    """The parts that one rank sends; the first one makes their file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank{rank}.sent"
        self._file: RecordFile | None = None
        self._closed = False

    def write(self, op: int, parts: Sequence[int]) -> None:
        """Write the bytes that an op sends to each member of its group, by place; empty parts are left out."""
        if self._closed:
            return
        if self._file is None:
            self._file = RecordFile(self._path, "sent", SENT_PART.itemsize, capacity=256)
        for member, nbytes in enumerate(parts):
            if nbytes:
                self._file.append(_PACK(op, member, nbytes))

    def close(self, state: int) -> None:
        """Write nothing more."""
        self._closed = True
        if self._file is not None:
            self._file.close(state)
