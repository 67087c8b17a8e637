"""Packets: what a rank has recorded since its last packet, and the copy of its files that rank 0 makes from them.

The copy has the same names and layout as the rank's own files, with times on rank 0's clock. So whatever reads the
folder of a run (traces, the live view, the search for hangs) needs to know nothing of other machines.

A record may change after it was written: an op gets its end later. `Sender` compares the newest `WINDOW` records, and
those older ones that were open, with what it has sent.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.launch.process.folder import part, read_error, write_error
from mpkit.support.disk import write_whole
from mpkit.trace import HEADER, MEMORY, OP
from mpkit.trace.files import mapped
from mpkit.trace.records import MAGIC, VALUE

__all__ = ["Mirror", "Sender"]

WINDOW = 20_000
"""The newest ops whose changes are sent."""

MOST_OPS, MOST_BYTES = 20_000, 1_000_000
"""The most ops, and bytes of each other file, per packet: with four packets per second, training has the network."""

GROWING = {"mem": MEMORY, "log": VALUE}
"""Files of records that never change once they are written: memory, and what functions of the user's logged."""

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
        rows, head = _records(part(self._folder, self._rank, "ops"), OP.itemsize)
        if len(rows) < self._count:
            return None
        grown = {name: self._grown(name) for name in GROWING}
        until = min(len(rows), self._count + MOST_OPS)
        which, ops = self._changed(rows, until)
        texts = {name: self._appended(name) for name in self._read}
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

    def _changed(self, rows: Array, until: int) -> tuple[Array, Array]:
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

    def _grown(self, name: str) -> Array:
        """Return the records that were added to a file whose records never change."""
        rows, _ = _records(part(self._folder, self._rank, name), GROWING[name].itemsize)
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

    def _appended(self, name: str) -> bytes:
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


class Mirror:
    """Writes a copy of another rank's files, packet by packet.

    Args:
        folder: the folder of the copy.
        rank: the rank.
        offset: ns to add to the rank's times.
    """

    def __init__(self, folder: Path, rank: int, offset: int) -> None:
        self._folder, self._rank, self._offset = folder, rank, offset
        flags = os.O_RDWR | os.O_CREAT
        self._files = {
            name: os.open(part(folder, rank, name), flags, 0o600) for name in ("ops", "mem", "names", "taken")
        }
        self._ends = {"names": 0, "taken": 0}
        self._written_of = dict.fromkeys(GROWING, 0)

    def take(self, packet: bytes) -> None:
        """Write what a packet says."""
        body, parts, place = zlib.decompress(packet), [], 0
        while place < len(body):
            (size,) = struct.unpack_from("<q", body, place)
            parts.append(body[place + 8 : place + 8 + size])
            place += 8 + size
        fields, which, rows, *news = parts
        texts = news[len(GROWING) :]
        told = json.loads(fields)
        for name, text in zip(self._ends, texts, strict=True):
            os.pwrite(self._files[name], text, self._ends[name])
            self._ends[name] += len(text)
        if told["axes"]:
            write_whole(part(self._folder, self._rank, "axes"), told["axes"].encode())
        for name, new in zip(GROWING, news, strict=False):
            self._write_grown(name, new, told)
        self._write_ops(np.frombuffer(which, np.int64), np.frombuffer(rows, OP).copy(), told)
        if told["error"] is not None:
            told["error"]["time"] += self._offset
            write_error(self._folder, self._rank, told["error"])

    def _write_grown(self, name: str, new: bytes, told: dict[str, Any]) -> None:
        rows = np.frombuffer(new, GROWING[name]).copy()
        if name not in self._files:
            if not len(rows):
                return  # a rank that logs nothing has no such file
            path = part(self._folder, self._rank, name)
            self._files[name] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        rows["time"] += self._offset
        place = HEADER.itemsize + self._written_of[name] * rows.itemsize
        os.pwrite(self._files[name], rows.tobytes(), place)
        self._written_of[name] = told[name]
        _head(self._files[name], name, told[name], told["state"])

    def _write_ops(self, which: Array, rows: Array, told: dict[str, Any]) -> None:
        rows["start"] += self._offset
        rows["end"][rows["end"] > 0] += self._offset
        breaks = np.flatnonzero(np.diff(which) != 1) + 1
        for numbers, ops in zip(np.split(which, breaks), np.split(rows, breaks), strict=True):
            if len(numbers):
                place = HEADER.itemsize + int(numbers[0]) * OP.itemsize
                os.pwrite(self._files["ops"], ops.tobytes(), place)
        _head(self._files["ops"], "ops", told["ops"], told["state"])  # last: it counts complete records

    def correct(self, drift: int, since: int, until: int) -> None:
        """Spread `drift` ns evenly over the times from `since` to `until`: clocks of two nodes differ in speed."""
        for name, dtype, columns in (
            ("ops", OP, ("start", "end")),
            ("mem", MEMORY, ("time",)),
            ("log", VALUE, ("time",)),
        ):
            if name not in self._files:
                continue
            raw, _ = _records(part(self._folder, self._rank, name), dtype.itemsize)
            rows = np.ascontiguousarray(raw).view(dtype).reshape(-1).copy()
            for column in columns:
                there = rows[column] > 0
                elapsed = rows[column][there] - since
                rows[column][there] += (drift * (elapsed / max(1, until - since))).astype(np.int64)
            os.pwrite(self._files[name], rows.tobytes(), HEADER.itemsize)

    def close(self) -> None:
        """Close the files of the copy."""
        for file in self._files.values():
            os.close(file)
        self._files = {}


def _records(path: Path, size: int) -> tuple[Array, int]:
    """Return the complete records of a file as rows of bytes, and its state."""
    data = mapped(path)
    if len(data) < HEADER.itemsize:
        return np.empty((0, size), np.uint8), 0
    head = data[: HEADER.itemsize].view(HEADER)[0]
    count = min(int(head["count"]), (len(data) - HEADER.itemsize) // size)
    rows = data[HEADER.itemsize : HEADER.itemsize + count * size].reshape(count, size)
    return rows, int(head["state"])


def _ends(rows: Array) -> Array:
    ends: Array = np.ascontiguousarray(rows).view(OP)["end"].reshape(-1)
    return ends


def _head(file: int, what: str, count: int, state: int) -> None:
    head = np.zeros(1, HEADER)
    head["magic"], head["count"], head["state"] = MAGIC[what], count, state
    os.pwrite(file, head.tobytes(), 0)
