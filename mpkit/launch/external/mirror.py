"""The copy of another rank's files that rank 0 makes from its packets.

The copy has the same names and layout as the rank's own files, with times on rank 0's clock. So whatever reads the
folder of a run (traces, the live view, the search for hangs) needs to know nothing of other machines.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.common.disk import write_whole
from mpkit.common.launch_folder import part, write_error
from mpkit.common.private import create
from mpkit.errors import MpkitError
from mpkit.launch.external.packets import GROWING, MOST_OPS, Array, records
from mpkit.trace import HEADER, MEMORY, OP
from mpkit.trace.records import MAGIC, VALUE

__all__ = ["FileMirror"]

MOST_PACKET = 1 << 26
"""Bytes of a packet, which are unpacked in memory."""


class FileMirror:
    """Writes a copy of another rank's files, packet by packet.

    Args:
        folder: the folder of the copy.
        rank: the rank.
        offset: ns to add to the rank's times.
    """

    def __init__(self, folder: Path, rank: int, offset: int) -> None:
        self._folder, self._rank, self._offset = folder, rank, offset
        self._files = {name: create(part(folder, rank, name)) for name in ("ops", "mem", "names", "taken")}
        self._ends, self._count = {"names": 0, "taken": 0}, 0
        self._written_of = dict.fromkeys(GROWING, 0)

    def take(self, packet: bytes) -> None:
        """Write what a packet says.

        Raises:
            MpkitError: no `Sender` makes such a packet.
        """
        try:
            self._write(*_parts(packet))
        except (KeyError, TypeError, ValueError, struct.error, zlib.error) as error:
            raise MpkitError(f"rank {self._rank} has sent a packet that cannot be read: {error}") from error

    def _write(self, fields: bytes, which: bytes, rows: bytes, *news: bytes) -> None:
        texts = news[len(GROWING) :]
        told = json.loads(fields)
        numbers = np.frombuffer(which, np.int64)
        if not (
            0 <= told["ops"] - self._count <= MOST_OPS
            and (numbers >= 0).all()
            and (numbers < told["ops"]).all()
        ):
            raise ValueError(f"{told['ops']} ops after {self._count}")
        self._count = told["ops"]
        for name, text in zip(self._ends, texts, strict=True):
            os.pwrite(self._files[name], text, self._ends[name])
            self._ends[name] += len(text)
        if told["axes"]:
            write_whole(part(self._folder, self._rank, "axes"), told["axes"].encode())
        for name, new in zip(GROWING, news, strict=False):
            self._write_grown(name, new, told)
        self._write_ops(numbers, np.frombuffer(rows, OP).copy(), told)
        if told["error"] is not None:
            told["error"]["time"] += self._offset
            write_error(self._folder, self._rank, told["error"])

    def _write_grown(self, name: str, new: bytes, told: dict[str, Any]) -> None:
        rows = np.frombuffer(new, GROWING[name]).copy()
        if name not in self._files:
            if not len(rows):
                return  # a rank that writes no such record has no such file
            path = part(self._folder, self._rank, name)
            self._files[name] = create(path)
        if "time" in (rows.dtype.names or ()):
            rows["time"] += self._offset
        place = HEADER.itemsize + self._written_of[name] * rows.itemsize
        os.pwrite(self._files[name], rows.tobytes(), place)
        self._written_of[name] += len(rows)
        _head(self._files[name], name, self._written_of[name], told["state"])

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
            raw, _ = records(part(self._folder, self._rank, name), dtype.itemsize)
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


def _parts(packet: bytes) -> list[bytes]:
    """Return the parts of a packet, which has no more bytes than a `Sender` puts into one."""
    body, parts, place = zlib.decompressobj().decompress(packet, MOST_PACKET), [], 0
    if len(body) == MOST_PACKET:
        raise ValueError(f"it has {MOST_PACKET:,} bytes or more")
    while place < len(body):
        (size,) = struct.unpack_from("<q", body, place)
        if size < 0:
            raise ValueError(f"a part of {size} bytes")
        parts.append(body[place + 8 : place + 8 + size])
        place += 8 + size
    return parts


def _head(file: int, what: str, count: int, state: int) -> None:
    head = np.zeros(1, HEADER)
    head["magic"], head["count"], head["state"] = MAGIC[what], count, state
    os.pwrite(file, head.tobytes(), 0)
