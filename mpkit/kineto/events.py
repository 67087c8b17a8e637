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

from mpkit.kineto.read import EventStream

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
COLUMNS = ("name", "thread", "correlation", "external", "nbytes", "records")
_COMMUNICATES = ("Collective name", "Process Group Name", "In msg nelems")
_CALLS = re.compile(
    r"torch::autograd::AccumulateGrad|c10d::|record_param_comms|gloo:|nccl:|rccl:|ucc:|xccl:|mpi:"
)


class Table:
    """Events of one kind as columns.

    Attributes:
        name: (n,) numbers of `Events.names`.
        start, end: (n,) ns.
        thread: (n,) numbers of threads, or of streams for what runs on a device.
        correlation, external: (n,) the ids that join events; -1: none.
        nbytes: (n,) what a copy moves.
        records: (n,) 1 for an operator that autograd records, so it is of a forward.
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
        if whole:
            self.args[len(self)] = args
        columns = self._columns
        columns["name"].append(name)
        columns["thread"].append(thread)
        columns["correlation"].append(int(args.get("correlation", -1)))
        columns["external"].append(int(args.get("External id", args.get("external id", -1))))
        columns["nbytes"].append(int(args.get("bytes", args.get("Bytes", 0)) or 0))
        columns["records"].append("Sequence number" in args and not args.get("Fwd thread id"))
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
        TraceError: the file is no JSON.
    """
    events, stream = Events(), EventStream(path, progress)
    names: dict[str, int] = {}
    threads: dict[tuple[Any, Any], int] = {}
    kinds: dict[Any, str] = {}
    memory = array("q")
    opened: dict[tuple[Any, Any], list[dict[str, Any]]] = {}  # of B, until its E
    for event in stream:
        phase = event.get("ph")
        if phase == "X":
            category = event.get("cat")
            word = kinds.get(category) or kinds.setdefault(
                category, CATEGORIES.get(str(category).lower(), "other")
            )
            name = event.get("name", "")
            if (word == "other" and category == "Trace") or (
                word == "module" and not name.startswith("nn.Module")
            ):
                continue
            if category == "gpu_user_annotation":
                continue
            _add(events, names, threads, word, event)
        elif phase == "i" and event.get("name") == "[memory]":
            args = event["args"]
            memory.extend((
                _ns(event["ts"]), int(args["Bytes"]), int(args.get("Device Type", 0)),
                int(args.get("Total Allocated", -1)), int(args.get("Total Reserved", -1)),
            ))  # fmt: skip
        elif phase == "B":
            opened.setdefault((event.get("pid"), event.get("tid")), []).append(event)
        elif phase == "E" and (begun := opened.get((event.get("pid"), event.get("tid")))):
            began = begun.pop()
            _add(events, names, threads, "other", {**began, "dur": event["ts"] - began["ts"]})
    events.names, events.header = list(names), stream.header
    events.threads = [(str(process), str(thread)) for process, thread in threads]
    events.repairs = {what: count for what, count in stream.repairs.items() if count}
    _close(events, np.array(memory, np.int64).reshape(-1, 5))
    return events


def _add(
    events: Events, names: dict[str, int], threads: dict[tuple[Any, Any], int], word: str, event: dict[str, Any]
) -> None:  # fmt: skip
    args = event.get("args") or {}
    name = str(event.get("name", ""))
    place = event.get("pid"), event.get("tid")
    if word in DEVICE:
        place = args.get("device", place[0]), args.get("stream", place[1])
    number, thread = names.setdefault(name, len(names)), threads.setdefault(place, len(threads))
    whole = (
        _CALLS.match(name) is not None
        if word in ("op", "annotation")
        else word == "kernel" and _COMMUNICATES[0] in args
    )
    ts, took = float(event.get("ts", 0)), float(event.get("dur", 0) or 0)
    events.tables[word].add(number, ts, took, thread, args, whole=whole)


def _ns(us: float) -> int:
    """Return ns, without rounding the many digits that us since 1970 have."""
    return int(us) * 1000 + round(us % 1 * 1e3)


def _close(events: Events, memory: Array) -> None:
    """Put all times on ns since the first event."""
    tables = events.tables.values()
    first = min((min(table._times[0]) for table in tables if len(table)), default=0.0)
    for table in tables:
        table.close(first)
    if len(memory):
        memory[:, 0] -= _ns(first)
    events.memory = memory
    events.origin = _ns(first) + int(events.header.get("baseTimeNanoseconds", 0) or 0)
