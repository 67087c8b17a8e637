"""Events of one kind as columns."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.foreign.reading.sound_event import count_of, sound_args

__all__ = ["EventTable"]

Array = npt.NDArray[Any]

COLUMNS = ("name", "thread", "correlation", "external", "nbytes", "records", "operand")


class EventTable:
    """Events of one kind as columns.

    Attributes:
        name: (n,) numbers of `Events.names`.
        start, end: (n,) ns.
        thread: (n,) numbers of threads, or of streams for what runs on a device.
        correlation, external: (n,) the ids that join events; -1: none.
        nbytes: (n,) what a copy moves.
        records: (n,) 1 for an operator that autograd records, so it is of a forward.
        operand: (n,) of an operator's first operands: 1 in 32 bits, 2 in 16, 3 in 8; 0 if unknown.
        args: what communicates has all its arguments here, by row.
    """

    def __init__(self) -> None:
        self._columns = {name: array("q") for name in COLUMNS}
        self._times = array("d"), array("d")
        self.args: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._times[0])

    def add(
        self, name: int, ts: float, took: float, thread: int, args: dict[str, Any], *, whole: bool
    ) -> None:
        """Add an event; `ts` and `took` in us, `whole`: keep its arguments."""
        correlation = count_of(args, "correlation", -1, 2**63 - 1)
        external = count_of(args, "External id" if "External id" in args else "external id", -1, 2**63 - 1)
        nbytes = count_of(args, "bytes" if "bytes" in args else "Bytes", 0, least=0)
        if whole:
            self.args[len(self)] = sound_args(args)
        columns = self._columns
        columns["name"].append(name)
        columns["thread"].append(thread)
        columns["correlation"].append(correlation)
        columns["external"].append(external)
        columns["nbytes"].append(nbytes)
        columns["records"].append("Sequence number" in args and not args.get("Fwd thread id"))
        columns["operand"].append(_operand(args))
        self._times[0].append(ts)
        self._times[1].append(took)

    def close(self, origin: float) -> None:
        """Turn the columns into arrays, with ns since `origin` (us)."""
        ts, took = (np.frombuffer(each) if len(each) else np.zeros(0) for each in self._times)
        self.start: Array = np.rint((ts - origin) * 1e3).astype(np.int64)
        self.end: Array = self.start + np.rint(took * 1e3).astype(np.int64)
        for name, column in self._columns.items():
            setattr(self, name, np.array(column, np.int64))

    name: Array
    thread: Array
    correlation: Array
    external: Array
    nbytes: Array
    records: Array
    operand: Array


_BITS = {"float": 1, "half": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2}


def _operand(args: dict[str, Any]) -> int:
    """Return the number for the dtype of an operator's first operands."""
    types = args.get("Input type")
    for each in types[:3] if isinstance(types, list) else ():
        word = each.lower() if isinstance(each, str) else ""
        if word in _BITS or "float8" in word:
            return _BITS.get(word, 3)
    return 0
