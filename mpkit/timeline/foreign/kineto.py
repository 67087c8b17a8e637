"""The events of one rank's file as columns, by what they are.

    kineto.toml    what categories, kernels and annotations are
    read_events    each event becomes a row of numbers; one that no tool writes ends the reading, with its number
    Events         the columns, and how one event finds another:
                   kernel -(correlation)-> call of the runtime -(External id)-> operator

Times are nanoseconds since the file's first event; `Events.origin` puts them on the clock of the machine.
"""

from __future__ import annotations

import re
import reprlib
import tomllib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.errors import TraceError
from mpkit.timeline.foreign.stream import EventStream

__all__ = ["DEVICE", "PATTERNS", "TABLE", "EventTable", "Events", "read_events", "show_value", "text_of"]

Array = npt.NDArray[Any]

TABLE: dict[str, Any] = tomllib.loads(files(__package__).joinpath("kineto.toml").read_text(encoding="utf-8"))
"""What the events of torch.profiler are (`kineto.toml`)."""
PATTERNS: dict[str, re.Pattern[str]] = {name: re.compile(text) for name, text in TABLE["patterns"].items()}

_WORDS = {category: word for word, categories in TABLE["categories"].items() for category in categories}
_ANNOTATIONS = tuple(TABLE["annotations"])
DEVICE = ("kernel", "copy", "set")

COLUMNS = ("name", "start", "end", "thread", "correlation", "external", "nbytes", "records", "operand")
MOST = 2**50  # elements or bytes of one call
MOST_OPEN = 100_000  # spans that have begun and not ended
LONGEST = 10**18  # ns from a file's first event to its last: 31 years
_BITS = {"float": 1, "half": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2}


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
        args: by row, the arguments of what communicates, as `_communication_args` returns them.
    """

    def __init__(self) -> None:
        self.rows = array("q")  # of as many numbers as there are columns, until all are read
        self.args: dict[int, dict[str, Any]] = {}
        self.close(0)

    def __len__(self) -> int:
        return len(self.rows) // len(COLUMNS) or len(self.name)

    def close(self, origin: int) -> None:
        """Turn the rows into columns, with ns since `origin`."""
        table = np.array(self.rows, np.int64).reshape(-1, len(COLUMNS))
        table[:, 1:3] -= origin
        columns = np.ascontiguousarray(table.T)
        self.name, self.start, self.end, self.thread, self.correlation, self.external = columns[:6]
        self.nbytes, self.records, self.operand = columns[6:]
        self.rows = array("q")


class Events:
    """All events of one rank's file.

    Attributes:
        names: the strings that tables refer to.
        threads: each thread's (process, thread), or (device, stream).
        tables: by what it is: "op", "annotation", "module", "call", "kernel", "copy", "set", "other".
        memory: (m, 5) of int64: ns, bytes (negative: freed), device type, total allocated, total reserved.
        header: what the file says beside its events.
        origin: ns of the machine's clock at which the times begin; Kineto's clock where there is no other.
        repairs: what was fixed in the file's JSON, with how often.
        assumed: what was left out or assumed of its events, with how often.
        phases: how many events there are of each phase ("ph") that is not drawn.
        processes: the names of processes, where the file has them.
        categories: of each row of "other".
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: list[tuple[str, str]] = []
        self.tables = {word: EventTable() for word in (*TABLE["categories"], "other")}
        self.memory: Array = np.zeros((0, 5), np.int64)
        self.header: dict[str, Any] = {}
        self.origin = 0
        self.repairs: dict[str, int] = {}
        self.assumed: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()
        self.processes: dict[str, str] = {}
        self.categories: list[str] = []

    def __getitem__(self, word: str) -> EventTable:
        return self.tables[word]

    @property
    def is_kineto(self) -> bool:
        """Whether torch.profiler wrote it, as far as its categories tell."""
        return any(len(self[word]) for word in self.tables if word != "other")

    @property
    def on_device(self) -> bool:
        """Whether anything ran on a GPU."""
        return any(len(self[word]) for word in DEVICE)

    def notes(self, source: str) -> list[str]:
        """Return sentences on what was fixed, left out or assumed in the file of this name."""
        kinds = {" was not valid JSON and was fixed": self.repairs, ": left out or assumed": self.assumed}
        return [
            f"{source}{what}: " + ", ".join(f"{each} ({count:,})" for each, count in counted.items()) + "."
            for what, counted in kinds.items()
            if counted
        ]

    def named(self, word: str, fits: Callable[[str], Any]) -> Array:
        """Return the rows of a table whose names fit."""
        chosen = np.array([bool(fits(name)) for name in self.names] + [False])
        return np.flatnonzero(chosen[self[word].name])

    def launches(self, word: str) -> Array:
        """Return, for each event of a device's table, the row of the runtime's call that launched it; -1: unknown."""
        return _rows(self["call"].correlation, self[word].correlation)

    def operators(self, word: str) -> Array:
        """Return, for each event of a device's table, the row of the operator that launched it; -1: unknown."""
        external = self[word].external
        by_call = np.append(self["call"].external, -1)[self.launches(word)]
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


# ---- reading


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
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise TraceError(
                f"{path}: event {number:,} ({show_value(event.get('name'))}) cannot be read: {error}. It is "
                f"{show_value(event):.300}"
            ) from None
    events.header = stream.header
    events.repairs = {what: count for what, count in stream.repairs.items() if count}
    try:
        reader.close()
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{path}: {error}") from None
    return events


class _Reader:
    """Takes one event after the other, and adds it to the columns."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._memory = array("q")
        self._opened: dict[tuple[str, str], list[dict[str, Any]]] = {}  # of B, until its E
        self._depth = 0

    def take(self, event: dict[str, Any]) -> None:
        """Add an event, if it is of a kind that is drawn; any error says that it has something that no tool writes."""
        phase, name, events = event.get("ph"), _text(event.get("name")), self._events
        args = event.get("args") or {}
        if phase in ("X", "B", "E") and event.get("ts") is None:
            events.assumed["event without a time, left out"] += 1
        elif phase == "X":
            category = _text(event.get("cat")) if "cat" in event else ""
            word = _WORDS.get(category.lower(), "other")
            if word == "op" and category == "Operator" and name.startswith(_ANNOTATIONS):
                word = "annotation"
            is_frame = word == "module" and not name.startswith("nn.Module")
            if not is_frame and category not in ("Trace", "gpu_user_annotation"):
                self._add(word, name, event, args, category)
        elif phase in ("B", "E"):
            opened = self._opened.setdefault((_text(event.get("pid")), _text(event.get("tid"))), [])
            if phase == "B":
                self._depth += 1
                if self._depth > MOST_OPEN:
                    raise ValueError(f"more than {MOST_OPEN:,} spans are open")
                opened.append({**event, "ns": _ns(event, "ts")})
            elif not opened:
                events.assumed["end of a span that never began, left out"] += 1
            else:
                self._depth -= 1
                began = opened.pop()
                took = (_ns(event, "ts") - began["ns"]) / 1e3
                self._add("other", _text(began.get("name")), {**began, "dur": took}, began.get("args") or {})
        elif phase == "i" and name == "[memory]":
            if event.get("ts") is None or "Bytes" not in args:
                events.assumed["[memory] without its time or bytes, left out"] += 1
                return
            counts = _number(args, "Bytes", 0, MOST), _number(args, "Device Type", 0, 255)
            totals = _number(args, "Total Allocated", -1, MOST), _number(args, "Total Reserved", -1, MOST)
            self._memory.extend((_ns(event, "ts"), *counts, *totals))
        elif phase == "M" and name == "process_name":
            events.processes[_text(event.get("pid"))] = text_of(args.get("name"))
        elif phase != "M":
            events.phases[_text(phase)] += 1

    def _add(
        self, word: str, name: str, event: Mapping[str, Any], args: Mapping[str, Any], category: str = ""
    ) -> None:
        assumed = self._events.assumed
        if event.get("dur") is None:
            assumed["span without an end, taken as one of no length"] += 1
        if word == "annotation" and name.startswith("ProfilerStep#") and not PATTERNS["step"].match(name):
            assumed["ProfilerStep whose number no run reaches, not taken for a step"] += 1
        process, lane = event.get("pid"), event.get("tid")
        if word in DEVICE:
            process, lane = args.get("device", process), args.get("stream", lane)
        thread = self._threads.setdefault((_text(process), _text(lane)), len(self._threads))
        start, took = _ns(event, "ts"), _ns(event, "dur")
        if took < 0:
            raise ValueError(f"dur={show_value(event['dur'])} is no time")
        table = self._events.tables[word]
        communicates = word in ("op", "annotation") and PATTERNS["issues"].match(name)
        if communicates or (word == "kernel" and "Collective name" in args):
            table.args[len(table)] = _communication_args(args)
        external = _number(args, "External id" if "External id" in args else "external id")
        nbytes = _number(args, "bytes" if "bytes" in args else "Bytes", 0, MOST)
        records = "Sequence number" in args and not args.get("Fwd thread id")
        number = self._names.setdefault(name, len(self._names))
        joined = _number(args, "correlation"), external
        table.rows.extend((number, start, start + took, thread, *joined, nbytes, records, _operand(args)))
        if word == "other":
            self._events.categories.append(category)

    def close(self) -> None:
        """Put all times on ns since the first event.

        Raises:
            ValueError: they are further apart than any run is long.
        """
        events = self._events
        if left := sum(map(len, self._opened.values())):
            events.assumed["span without an end, left out"] += left
        events.names, events.threads = list(self._names), list(self._threads)
        starts = [
            np.frombuffer(table.rows, np.int64)[1 :: len(COLUMNS)]
            for table in events.tables.values()
            if len(table)
        ]
        first = min((int(each.min()) for each in starts), default=0)
        last = max((int(each.max()) for each in starts), default=0)
        if last - first > LONGEST:
            raise ValueError(f"its events are from {first:,} to {last:,} ns, which no run takes")
        del starts  # views of the rows, which cannot grow meanwhile
        for table in events.tables.values():
            table.close(first)
        events.memory = np.array(self._memory, np.int64).reshape(-1, 5)
        events.memory[:, 0] -= first
        events.origin = first + _number(events.header, "baseTimeNanoseconds", 0, 2**62)


# ---- values


def show_value(value: Any) -> str:
    """Return a value of a file as Python writes it, however long and deep it is.

    >>> show_value({"ph": "X", "args": {"a": [[[[[[[1]]]]]]], "b": "x" * 1000}})
    "{'ph': 'X', 'args': {'a': [[[[[...]]]]], 'b': 'xxxxxxxxxxxx...xxxxxxxxxxxxx'}}"
    """
    if isinstance(value, dict):  # in the order of the file
        shown = ", ".join(f"{key!r:.60}: {reprlib.repr(each)}" for key, each in [*value.items()][:12])
        return f"{{{shown}}}"
    return reprlib.repr(value)


def text_of(value: Any) -> str:
    """Return a name that a file has; "" for what is none.

    >>> text_of("nccl"), text_of(3), text_of(None), text_of({"a": 1})
    ('nccl', '3', '', '')
    """
    return str(value) if isinstance(value, str | int | float) else ""


def _text(value: Any) -> str:
    """Return a name, or what stands in its place, written out."""
    return value if type(value) is str else str(value) if type(value) is int else show_value(value)


def _ns(event: Mapping[str, Any], key: str) -> int:
    """Return a time of an event in ns, without rounding the many digits that us since 1970 have; 0 if it has none."""
    value = event.get(key)
    if value is None:
        return 0
    time = float(value)
    if not -9e15 < time < 9e15:  # us: until the year 2255, in as many ns as int64 holds; nan is not
        raise ValueError(f"{key}={show_value(value)} is no time")
    whole = int(time)
    return whole * 1000 + round((time - whole) * 1e3)


def _number(args: Mapping[str, Any], key: str, default: int = -1, most: int = 2**63 - 1) -> int:
    """Return a whole number among an event's arguments, of this size at most."""
    value = args.get(key)
    if value is None or value == "":  # an empty value that was fixed
        return default
    number = int(value)
    if not -most <= number <= most:
        raise ValueError(f"{key}={show_value(value)} is no number up to {most:,}")
    return number


def _communication_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is used of the arguments of a call that communicates: numbers, texts, and the elements of its inputs.

    "elements" counts those of the largest tensor, or list of tensors, among the inputs; "types" are their dtypes.
    """
    sound: dict[str, Any] = {
        name: _number(args, name, -1, most) for name, most in TABLE["counts"].items() if name in args
    }
    for name in ("Collective name", "dtype", "Process Group Name", "Process Group Description"):
        sound[name] = text_of(args.get(name))
    for name in ("Process Group Ranks", "In split size"):
        listed = args.get(name, "")
        sound[name] = listed if isinstance(listed, str) else "[" + ", ".join(map(text_of, listed)) + "]"
    for name, kept in (("Input type", "types"), ("Concrete Inputs", "inputs")):
        sound[kept] = [*map(text_of, args.get(name, ()))]
    sound["elements"] = max((_elements(shape) for shape in args.get("Input Dims", ())), default=0)
    return sound


def _elements(shape: Any) -> int:
    """Return the elements of a tensor of this shape, or of all tensors in a list of shapes."""
    shapes = shape if shape and isinstance(shape[0], list) else [shape]
    elements = sum(prod(map(float, each)) for each in shapes if each)
    if not 0 <= elements <= MOST:
        raise ValueError(f"Input Dims: {show_value(shape)} has no number of elements up to {MOST:,}")
    return int(elements)


def _operand(args: Mapping[str, Any]) -> int:
    """Return the number for the dtype of an operator's first operands."""
    types = args.get("Input type")
    for each in types[:3] if isinstance(types, list) else ():
        word = each.lower() if isinstance(each, str) else ""
        if word in _BITS or "float8" in word:
            return _BITS.get(word, 3)
    return 0
