"""Ops that are recorded in several parts: an action that makes way for another one, and goes on later.

    suspend   the open ops end, as parts that others follow
    resume    each of them begins again, as a part that continues it; whoever ends the op names the first part
    settle    the op is over: its FLOPs and bytes, known of the whole, are divided among its parts by their time

Until an op is settled its parts are marked, and a live replay leaves them for later.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

from mpkit.trace import HEADER, OP, PartFlag
from mpkit.trace.record.files import RecordFile

__all__ = ["OpParts"]

_AT_FLAGS = int(OP.fields["flags"][1])  # type: ignore[index]
_AT_BYTES, _AT_FLOPS = int(OP.fields["bytes"][1]), int(OP.fields["flops"][1])  # type: ignore[index]


class OpParts:
    """The ops in several parts of one rank that are not over.

    Args:
        file: the rank's file of ops.
        by_cpu: whether parts are compared by CPU time; otherwise by the time of their events.
        divides: whether FLOPs are known of the whole op only.
    """

    def __init__(self, file: RecordFile, *, by_cpu: bool, divides: bool) -> None:
        self._file, self._by_cpu, self._divides = file, by_cpu, divides
        self._parts: dict[int, list[int]] = {}  # by the first
        self._first: dict[int, int] = {}  # by the latest

    def latest(self, index: int) -> int:
        """Return the latest part of an op, which is named by its first; an op that is whole is its own."""
        parts = self._parts.get(index)
        return index if parts is None else parts[-1]

    def suspend(self, latest: Iterable[int]) -> list[int]:
        """Mark these parts as ones that others follow, and return their firsts."""
        firsts = [self._first.get(index, index) for index in latest]
        for first in firsts:
            self._mark(self._parts.setdefault(first, [first])[-1], PartFlag.GOES_ON | PartFlag.UNSETTLED)
        return firsts

    def resume(self, first: int, part: int) -> None:
        """Add a part that has begun."""
        self._parts[first].append(part)
        self._first[part] = first
        self._mark(part, PartFlag.CONTINUES | PartFlag.UNSETTLED)

    def settle(self, first: int) -> None:
        """Divide what is known of the whole op among its parts; do nothing if it has one only."""
        parts = [part for part in self._parts.pop(first, []) if part >= 0]
        if not parts:
            return
        records = np.frombuffer(self._file.map, OP, self._file.count, HEADER.itemsize)
        ops = records[parts].copy()
        del records  # it would hold the mapping
        took = ops["cpu"] if self._by_cpu else ops["end"] - ops["start"]
        share = took / took.sum() if took.sum() > 0 else np.full(len(ops), 1 / len(ops))
        flops, bounds = ops["flops"].sum() * share, np.rint(ops["bytes"].sum() * np.cumsum(share))
        nbytes = np.diff(bounds, prepend=0)
        for i, part in enumerate(parts):
            self._first.pop(part, None)
            at = HEADER.itemsize + OP.itemsize * part
            if self._divides:
                struct.pack_into("<d", self._file.map, at + _AT_FLOPS, flops[i])
                struct.pack_into("<q", self._file.map, at + _AT_BYTES, int(nbytes[i]))
            self._file.map[at + _AT_FLAGS] &= ~PartFlag.UNSETTLED

    def _mark(self, index: int, flags: int) -> None:
        if index >= 0:
            self._file.map[HEADER.itemsize + OP.itemsize * index + _AT_FLAGS] |= flags
