"""Packets: what a rank has recorded since its last packet. `mirror` makes a copy of the rank's files from them.

A record may change after it was written: an op gets its end later. `Sender` compares the newest `WINDOW` records, and
those older ones that were open, with what it has sent.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.common.launch_folder import part, read_error
from mpkit.trace import HEADER, MEMORY, OP
from mpkit.trace.files import map_file
from mpkit.trace.records import SENT_PART, VALUE

__all__ = ["GROWING", "MOST_OPS", "WINDOW", "Sender", "records"]

WINDOW = 20_000
"""The newest ops whose changes are sent."""

MOST_OPS, MOST_BYTES = 20_000, 1_000_000
"""The most ops, and bytes of each other file, per packet: with four packets per second, training has the network."""

GROWING = {"mem": MEMORY, "log": VALUE, "sent": SENT_PART}
"""Files of records that never change once they are written: memory, what functions of the user's logged, and what
all-to-alls sent to whom.
"""

Array = npt.NDArray[Any]


class Sender:
    """Reads one rank's files, packet by packet.

    Args:
        folder: the folder into which the rank writes.
        rank: the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._low = self._count = (
            0  # ops low .. count were sent as `sent`, which is compared with what they are now
        )
        self._sent: Array = np.empty((0, OP.itemsize), np.uint8)
        self._open: Array = np.empty(0, np.int64)  # ops before `low` that had not ended
        self._sent_of = dict.fromkeys(GROWING, 0)
        self._axes = ""
        self._read = {"names": 0, "taken": 0}
        self._state, self._error = 0, False

    def packet(self) -> bytes | None:
        """Return what is new as a packet; None if nothing is, or the folder has been removed.

        The first rank of a node removes its folder when it has heard the verdict, which another may still wait for.
        """
        # The order matters: ops are read first, so that the names they refer to are there.
        rows, head = records(part(self._folder, self._rank, "ops"), OP.itemsize)
        if len(rows) < self._count:
            return None
        grown = {name: self._added_records(name) for name in GROWING}
        until = min(len(rows), self._count + MOST_OPS)
        which, ops = self._changed_ops(rows, until)
        texts = {name: self._added_lines(name) for name in self._read}
        error = None if self._error else read_error(self._folder, self._rank)
        axes = self._new_axes()
        all_read = until == len(rows) and all(len(new) < MOST_OPS for new in grown.values())
        state = head if all_read else 0
        news: list[Any] = [*grown.values(), *texts.values()]
        if not (len(which) or any(len(each) for each in news) or error or axes or state != self._state):
            return None
        self._state, self._error = state, error is not None or self._error
        fields = {"ops": until, "state": state, "error": error, "axes": axes, **self._sent_of}
        parts = [json.dumps(fields).encode(), which.tobytes(), ops.tobytes()]
        parts += [rows.tobytes() for rows in grown.values()]
        body = b"".join(struct.pack("<q", len(each)) + each for each in [*parts, *texts.values()])
        return zlib.compress(body, 1)

    def _changed_ops(self, rows: Array, until: int) -> tuple[Array, Array]:
        """Return the numbers and the records of new ops and of those that changed, and remember them as sent."""
        low = self._low
        window, old = np.array(rows[low:until]), np.array(rows[self._open])  # the rank goes on writing
        known = len(self._sent)
        changed = np.flatnonzero((window[:known] != self._sent).any(axis=1))
        near = np.concatenate([changed, np.arange(known, len(window))])
        ended = _ends(old) != 0
        which = np.concatenate([self._open[ended], low + near]).astype(np.int64)
        records = np.concatenate([old[ended], window[near]])
        self._low = max(low, until - WINDOW)
        gone = window[: self._low - low]
        self._open = np.concatenate([self._open[~ended], low + np.flatnonzero(_ends(gone) == 0)])[-WINDOW:]
        self._sent = window[self._low - low :]
        self._count = until
        return which, records

    def _added_records(self, name: str) -> Array:
        """Return the records that were added to a file whose records never change."""
        rows, _ = records(part(self._folder, self._rank, name), GROWING[name].itemsize)
        first = self._sent_of[name]
        new = np.array(rows[first : first + MOST_OPS])
        self._sent_of[name] += len(new)
        return new

    def _new_axes(self) -> str:
        """Return the file of a watched program's axes of a DeviceMesh, if it has changed."""
        path = part(self._folder, self._rank, "axes")
        text = path.read_text() if path.is_file() else ""
        if text == self._axes:
            return ""
        self._axes = text
        return text

    def _added_lines(self, name: str) -> bytes:
        """Return the complete lines that were added to a file of text."""
        try:
            with part(self._folder, self._rank, name).open("rb") as file:
                file.seek(self._read[name])
                text = file.read(MOST_BYTES)
        except FileNotFoundError:
            return b""
        text = text[: text.rfind(b"\n") + 1]
        self._read[name] += len(text)
        return text


def records(path: Path, size: int) -> tuple[Array, int]:
    """Return the complete records of a file as rows of bytes, and its state."""
    data = map_file(path)
    if len(data) < HEADER.itemsize:
        return np.empty((0, size), np.uint8), 0
    head = data[: HEADER.itemsize].view(HEADER)[0]
    count = min(int(head["count"]), (len(data) - HEADER.itemsize) // size)
    rows = data[HEADER.itemsize : HEADER.itemsize + count * size].reshape(count, size)
    return rows, int(head["state"])


def _ends(rows: Array) -> Array:
    ends: Array = np.ascontiguousarray(rows).view(OP)["end"].reshape(-1)
    return ends
