"""The events of one rank as columns, by what they are; and how one finds another.

    kernel -(correlation)-> call of the runtime -(External id)-> operator -> the annotations around it

Times are nanoseconds since the file's first event; `Events.origin` puts them on the clock of the machine.

Source: Kineto's output_json.cpp; torch/csrc/profiler/kineto_client_interface.cpp for the names of categories.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.errors import TraceError
from mpkit.kineto.read import EventStream
from mpkit.kineto.sound_event import count_of, time_of
from mpkit.kineto.table import Table

__all__ = ["DEVICE", "Events", "Table", "read_events"]

Array = npt.NDArray[Any]

CATEGORIES = {
    "cpu_op": "op", "operator": "op",
    "user_annotation": "annotation", "python_function": "module",
    "cuda_runtime": "call", "cuda_driver": "call", "runtime": "call", "hip_runtime": "call", "xpu_runtime": "call",
    "kernel": "kernel", "gpu_memcpy": "copy", "memcpy": "copy", "gpu_memset": "set", "memset": "set",
}  # fmt: skip
"""What each of Kineto's categories is, in lower case: today's, and those of torch 1.8."""

DEVICE = ("kernel", "copy", "set")
MOST_OPEN = 100_000
"""The most spans that have begun and not ended."""
LONGEST = 1e15
"""The longest time from a file's first event to its last, in us: 31 years."""
_COMMUNICATES = ("Collective name", "Process Group Name", "In msg nelems")
_CALLS = re.compile(
    r"torch::autograd::AccumulateGrad|c10d::|record_param_comms|gloo:|nccl:|rccl:|ucc:|xccl:|mpi:"
)


class Events:
    """All events of one rank's file.

    Attributes:
        names: the strings that tables refer to.
        threads: each thread's (process, thread), or (device, stream).
        tables: by what it is: "op", "annotation", "module", "call", "kernel", "copy", "set", "other".
        memory: (m, 5) of int64: ns, bytes (negative: freed), device type, total allocated, total reserved.
        header: what the file says beside its events.
        origin: ns of the machine's clock at which the times begin; Kineto's clock where there is no other.
        repairs: what was mended in the file, with how often.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: list[tuple[str, str]] = []
        self.tables = {word: Table() for word in (*dict.fromkeys(CATEGORIES.values()), "other")}
        self.memory: Array = np.zeros((0, 5), np.int64)
        self.header: dict[str, Any] = {}
        self.origin = 0
        self.repairs: dict[str, int] = {}

    def __getitem__(self, word: str) -> Table:
        return self.tables[word]

    @property
    def is_kineto(self) -> bool:
        """Whether torch.profiler wrote it, as far as its categories tell."""
        return any(len(self[word]) for word in self.tables if word != "other")

    @property
    def on_device(self) -> bool:
        """Whether anything ran on a GPU."""
        return any(len(self[word]) for word in DEVICE)

    def launches(self, word: str) -> Array:
        """Return, for each event of a device's table, the row of the runtime's call that launched it; -1: unknown."""
        return _rows(self["call"].correlation, self[word].correlation)

    def operators(self, word: str) -> Array:
        """Return, for each event of a device's table, the row of the operator that launched it; -1: unknown."""
        launch, external = self.launches(word), self[word].external
        by_call = np.append(self["call"].external, -1)[launch]
        return _rows(self["op"].external, np.where(by_call >= 0, by_call, external), external)


def _rows(ids: Array, *wanted: Array) -> Array:
    """Return the rows at which the ids are found, those of the first array of wanted ids for which they are."""
    found = np.full(len(wanted[0]), -1)
    if not len(ids):
        return found
    order = np.argsort(ids, kind="stable")
    for each in wanted:
        at = np.minimum(np.searchsorted(ids[order], each), len(ids) - 1)
        rows = np.where((ids[order][at] == each) & (each >= 0), order[at], -1)
        found = np.where(found < 0, rows, found)
    return found


def read_events(path: Path, progress: Callable[[int], None] = lambda done: None) -> Events:
    """Read a file of torch.profiler's, or any other in Chrome's format.

    Raises:
        TraceError: the file is no JSON, or an event has something that no tool writes.
    """
    events, stream = Events(), EventStream(path, progress)
    reader = _Reader(events)
    for number, event in enumerate(stream):
        try:
            reader.take(event)
        except (ValueError, TypeError) as error:
            raise TraceError(
                f"{path}: event {number:,} cannot be read: {error}. It is {event!r:.200}"
            ) from None
    events.header = stream.header
    events.repairs = {what: count for what, count in stream.repairs.items() if count}
    try:
        reader.close()
    except (ValueError, TypeError) as error:
        raise TraceError(f"{path}: {error}") from None
    return events


class _Reader:
    """Takes one event after the other.

    Args:
        events: what they are added to.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._kinds: dict[str, str] = {}
        self._memory = array("q")
        self._opened: dict[tuple[str, str], list[dict[str, Any]]] = {}  # of B, until its E
        self._depth = 0

    def take(self, event: dict[str, Any]) -> None:
        """Add an event, if it is of a kind that is drawn.

        Raises:
            ValueError, TypeError: it has something that no tool writes.
        """
        phase = event.get("ph")
        if phase == "X":
            category, name = str(event.get("cat")), str(event.get("name", ""))
            word = self._kinds.get(category)
            if word is None:
                word = self._kinds[category] = CATEGORIES.get(category.lower(), "other")
            is_frame = word == "module" and not name.startswith("nn.Module")
            if not (
                is_frame or (word == "other" and category == "Trace") or category == "gpu_user_annotation"
            ):
                self._add(word, event)
        elif phase == "i" and event.get("name") == "[memory]":
            args = _args_of(event)
            self._memory.extend((
                _ns(time_of(event, "ts")), count_of(args, "Bytes", 0), count_of(args, "Device Type", 0),
                count_of(args, "Total Allocated", -1), count_of(args, "Total Reserved", -1),
            ))  # fmt: skip
        elif phase == "B":
            self._depth += 1
            if self._depth > MOST_OPEN:
                raise ValueError(f"more than {MOST_OPEN:,} spans are open")
            self._opened.setdefault((str(event.get("pid")), str(event.get("tid"))), []).append(event)
        elif phase == "E" and (begun := self._opened.get((str(event.get("pid")), str(event.get("tid"))))):
            self._depth -= 1
            began = begun.pop()
            took = time_of(event, "ts") - time_of(began, "ts")
            self._add("other", {**began, "dur": took})

    def _add(self, word: str, event: dict[str, Any]) -> None:
        args, name = _args_of(event), str(event.get("name", ""))
        place = event.get("pid"), event.get("tid")
        if word in DEVICE:
            place = args.get("device", place[0]), args.get("stream", place[1])
        number = self._names.setdefault(name, len(self._names))
        thread = self._threads.setdefault((str(place[0]), str(place[1])), len(self._threads))
        whole = (
            _CALLS.match(name) is not None
            if word in ("op", "annotation")
            else word == "kernel" and _COMMUNICATES[0] in args
        )
        ts, took = time_of(event, "ts"), time_of(event, "dur", least=0.0)
        self._events.tables[word].add(number, ts, took, thread, args, whole=whole)

    def close(self) -> None:
        """Put all times on ns since the first event.

        Raises:
            ValueError: they are further apart than any run is long.
        """
        events = self._events
        events.names, events.threads = list(self._names), list(self._threads)
        tables = events.tables.values()
        first = min((min(table._times[0]) for table in tables if len(table)), default=0.0)
        last = max((max(table._times[0]) for table in tables if len(table)), default=0.0)
        if last - first > LONGEST:
            raise ValueError(f"its events are from {first:,} to {last:,} us, which no run takes")
        for table in tables:
            table.close(first)
        events.memory = np.array(self._memory, np.int64).reshape(-1, 5)
        events.memory[:, 0] -= _ns(first)
        events.origin = _ns(first) + count_of(events.header, "baseTimeNanoseconds", 0, 2**62)


def _args_of(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args") or {}
    if not isinstance(args, dict):
        raise TypeError(f"args={args!r:.60} are no names and values")
    return args


def _ns(us: float) -> int:
    """Return ns, without rounding the many digits that us since 1970 have."""
    return int(us) * 1000 + round(us % 1 * 1e3)
