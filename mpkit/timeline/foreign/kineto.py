"""One rank's file of torch.profiler: its events as columns, by what they are, and what it says of its rank.

    kineto.toml    what categories, kernels and annotations are
    Events         the columns, and how one event finds another:
                   kernel -(correlation)-> call of the runtime -(External id)-> operator
    RankIdentity   which rank it is, of how many, in which process groups, on which device

Times are nanoseconds since the file's first event; `Events.origin` puts them on the clock of the machine.
"""

from __future__ import annotations

import ast
import re
import reprlib
import tomllib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.size_limits import read_json
from mpkit.errors import TraceError
from mpkit.timeline.foreign.stream import EventStream
from mpkit.trace.validation import MOST_RANKS

TABLE: dict[str, Any] = tomllib.loads(files(__package__).joinpath("kineto.toml").read_text(encoding="utf-8"))
"""What the events of torch.profiler are (`kineto.toml`)."""
PATTERNS: dict[str, re.Pattern[str]] = {name: re.compile(text) for name, text in TABLE["patterns"].items()}

_WORDS = {category: word for word, categories in TABLE["categories"].items() for category in categories}
_IGNORED = frozenset(TABLE["ignored"])
_DEVICE = ("kernel", "copy", "set")

COLUMNS = ("name", "start", "end", "thread", "correlation", "external", "nbytes", "records", "operand")
MOST = 2**50  # elements or bytes of one call
LONGEST = 10**18  # ns from a file's first event to its last: 31 years
_BITS = {"float": 1, "half": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2}
_IN_NAME = re.compile(r"rank[-_]?(\d{1,5})", re.IGNORECASE)


class EventTable:
    """Events of one kind, as columns (n,) of int64, with times in ns.

    name                     a number of `Events.names`
    thread                   a number of a thread, or of a stream for events on a device
    correlation, external    ids that join events; -1: none
    nbytes                   moved by a copy
    records                  1 for an operator that autograd records, which belongs to a forward
    operand                  dtype of an operator's first operands: 1 in 32 bits, 2 in 16, 3 in 8; 0 if unknown
    args                     by row: the arguments of communication, from `_communication_args`
    """

    def __init__(self, rows: array[int], args: dict[int, dict[str, Any]], origin: int) -> None:
        table = np.array(rows, np.int64).reshape(-1, len(COLUMNS))
        table[:, 1:3] -= origin
        columns = np.ascontiguousarray(table.T)
        self.name, self.start, self.end, self.thread, self.correlation, self.external = columns[:6]
        self.nbytes, self.records, self.operand = columns[6:]
        self.args = args

    def __len__(self) -> int:
        return len(self.name)


class Events:
    """All events of one rank's file; a TraceError if it is not JSON, or an event has something that no tool writes.

    names              the strings that tables refer to
    streams            each thread's (process, thread), or (device, stream)
    tables             by word: "op", "annotation", "call", "kernel", "copy", "set"
    memory             (m, 4) of int64: ns, bytes (negative: freed), device type, total allocated
    about, host        the rank; its machine's name, "" if unknown
    origin             ns of the machine's clock at which the times begin; Kineto's clock if there is no other
    repairs, assumed   how often something in the JSON was fixed, or something was left out or assumed of events
    unknown            events of each category that `kineto.toml` does not have
    """

    def __init__(self, path: Path) -> None:
        self._numbers: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._rows = {word: array("q") for word in TABLE["categories"]}
        self._args: dict[str, dict[int, dict[str, Any]]] = {word: {} for word in self._rows}
        self.unknown: Counter[str] = Counter()
        self._memory = array("q")
        self.assumed: Counter[str] = Counter()
        stream = EventStream(path)
        for number, event in enumerate(stream):
            try:
                self._take(event)
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise TraceError(
                    f"{path}: event {number:,} cannot be read: {error}. It is {reprlib.repr(event)}"
                ) from None
        self.repairs = {what: count for what, count in stream.repairs.items() if count}
        try:
            self._close(stream.header)
            self.about = read_header(stream.header, path, self._gpu)
        except (ValueError, TypeError, OverflowError) as error:
            raise TraceError(f"{path}: {error}") from None
        self.host = text_of(stream.header.get("host_name"))

    def __getitem__(self, word: str) -> EventTable:
        return self.tables[word]

    @property
    def is_kineto(self) -> bool:
        """Whether torch.profiler wrote it, as far as its categories tell."""
        return any(map(len, self.tables.values()))

    @cached_property
    def on_device(self) -> bool:
        """Whether anything ran on a GPU."""
        return any(len(self[word]) for word in _DEVICE)

    @cached_property
    def communicates(self) -> Array:
        """(kernels,) whether a kernel is of NCCL, RCCL, oneCCL or another library that communicates."""
        chosen = np.zeros(len(self["kernel"]), bool)
        chosen[self.named("kernel", PATTERNS["communicates"].match)] = True
        return chosen

    def notes(self) -> list[str]:
        """Say what was fixed, left out or assumed in the file."""
        kinds = {" was not valid JSON and was fixed": self.repairs, ": left out or assumed": self.assumed}
        return [
            f"{self.about.source}{what}: " + ", ".join(f"{each} ({n:,})" for each, n in counted.items()) + "."
            for what, counted in kinds.items()
            if counted
        ]

    def named(self, word: str, fits: Callable[[str], Any]) -> Array:
        """Return the rows of a table whose names fit."""
        chosen = np.array([bool(fits(name)) for name in self.names] + [False])
        return np.flatnonzero(chosen[self[word].name])

    # For each event of a device's table:

    def launches(self, word: str) -> Array:
        """Return the row of the runtime's call that launched it; -1: unknown."""
        return _rows(self["call"].correlation, self[word].correlation)

    def asked(self, word: str) -> Array:
        """Return when its host launched it; its own start if that is unknown."""
        launch = self.launches(word)
        return np.where(launch >= 0, np.append(self["call"].start, 0)[launch], self[word].start)

    def operators(self, word: str) -> Array:
        """Return the row of the operator that launched it; -1: unknown."""
        external = self[word].external
        by_call = np.append(self["call"].external, -1)[self.launches(word)]
        return _rows(self["op"].external, np.where(by_call >= 0, by_call, external), external)

    # ---- reading

    def _take(self, event: dict[str, Any]) -> None:
        """Add an event of a known kind; any error means that it has something that no tool writes."""
        phase, name, args = event.get("ph"), _text(event.get("name")), event.get("args") or {}
        if phase == "X" and event.get("ts") is None:
            self.assumed["event without a time, left out"] += 1
        elif phase == "X":
            category = _text(event["cat"]) if "cat" in event else ""
            if word := _WORDS.get(category):
                self._add(word, name, event, args)
            elif category not in _IGNORED:
                self.unknown[category or "none"] += 1
        elif phase in ("B", "E"):
            self.assumed["beginning or end of a span of another tool, left out"] += 1
        elif phase == "i" and name == "[memory]":
            if event.get("ts") is None or "Bytes" not in args:
                self.assumed["[memory] without its time or bytes, left out"] += 1
                return
            counts = _number(args, "Bytes", 0, MOST), _number(args, "Device Type", 0, 255)
            self._memory.extend((_ns(event, "ts"), *counts, _number(args, "Total Allocated", -1, MOST)))

    def _add(self, word: str, name: str, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        if event.get("dur") is None:
            self.assumed["span without an end, taken as one of no length"] += 1
        start, took = _ns(event, "ts"), _ns(event, "dur")
        if took < 0:
            raise ValueError(f"dur={reprlib.repr(event['dur'])} is no time")
        if word == "annotation" and name.startswith("ProfilerStep#") and not PATTERNS["step"].match(name):
            self.assumed["ProfilerStep whose number no run reaches, not taken for a step"] += 1
        process, lane = event.get("pid"), event.get("tid")
        if word in _DEVICE:
            process, lane = args.get("device", process), args.get("stream", lane)
        thread = self._threads.setdefault((_text(process), _text(lane)), len(self._threads))
        rows = self._rows[word]
        communicates = word in ("op", "annotation") and PATTERNS["issues"].match(name)
        if communicates or (word == "kernel" and "Collective name" in args):
            self._args[word][len(rows) // len(COLUMNS)] = _communication_args(args)
        external = _number(args, "External id")
        nbytes = _number(args, "bytes" if "bytes" in args else "Bytes", 0, MOST)
        records = "Sequence number" in args and not args.get("Fwd thread id")
        number = self._numbers.setdefault(name, len(self._numbers))
        joined = _number(args, "correlation"), external
        rows.extend((number, start, start + took, thread, *joined, nbytes, records, _operand(args)))

    def _close(self, header: Mapping[str, Any]) -> None:
        """Put all times on ns since the first event."""
        times = [np.array(rows, np.int64).reshape(-1, len(COLUMNS))[:, 1:3] for rows in self._rows.values()]
        first = min((int(each[:, 0].min()) for each in times if len(each)), default=0)
        last = max((int(each[:, 0].max()) for each in times if len(each)), default=0)
        if last - first > LONGEST:
            raise ValueError(f"its events are from {first:,} to {last:,} ns, which no run takes")
        self.names, self.streams = list(self._numbers), list(self._threads)
        self.tables = {word: EventTable(rows, self._args[word], first) for word, rows in self._rows.items()}
        self.memory = np.array(self._memory, np.int64).reshape(-1, 4)
        self.memory[:, 0] -= first
        self.origin = first + _number(header, "baseTimeNanoseconds", 0, 2**62)
        del self._rows, self._memory

    @property
    def _gpu(self) -> str:
        """The number of the GPU that most kernels ran on."""
        counted = Counter(self.streams[stream][0] for stream in self["kernel"].thread.tolist())
        return counted.most_common(1)[0][0] if counted else "0"


def _rows(ids: Array, *wanted: Array) -> Array:
    """Return the row of each wanted id among `ids`, or that of its alternative in the next array; -1: none."""
    found = np.full(len(wanted[0]), -1)
    if not len(ids):
        return found
    order = np.argsort(ids, kind="stable")
    for each in wanted:
        at = np.minimum(np.searchsorted(ids[order], each), len(ids) - 1)
        rows = np.where((ids[order][at] == each) & (each >= 0), order[at], -1)
        found = np.where(found < 0, rows, found)
    return found


# ---- values


def text_of(value: Any) -> str:
    """Return a name, or a number in its place, as text; "" for anything else."""
    return str(value) if isinstance(value, str | int | float) else ""


def _text(value: Any) -> str:
    """Return a name, or whatever is in its place, written out."""
    return value if type(value) is str else str(value) if type(value) is int else reprlib.repr(value)


def _ns(event: Mapping[str, Any], key: str) -> int:
    """Return a time of an event in ns, without rounding the many digits of microseconds since 1970; 0 if absent."""
    value = event.get(key)
    if value is None:
        return 0
    time = float(value)
    if not -9e15 < time < 9e15:  # us: until the year 2255, in as many ns as int64 holds; nan is not
        raise ValueError(f"{key}={reprlib.repr(value)} is no time")
    whole = int(time)
    return whole * 1000 + round((time - whole) * 1e3)


def _number(args: Mapping[str, Any], key: str, default: int = -1, most: int = 2**63 - 1) -> int:
    """Return a whole number among an event's arguments, of this size at most."""
    value = args.get(key)
    if value is None or value == "":  # an empty value that was fixed
        return default
    number = int(value)
    if not -most <= number <= most:
        raise ValueError(f"{key}={value} is no number up to {most:,}")
    return number


def _communication_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's checked arguments; "elements" of its largest input (tensor or list), "types" of all inputs."""
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
    """Count the elements of a tensor of this shape, or of all tensors in a list of shapes."""
    shapes = shape if isinstance(shape, list) and shape and isinstance(shape[0], list) else [shape]
    elements = sum(prod(map(float, each)) for each in shapes if each)
    if not 0 <= elements <= MOST:
        raise ValueError(f"Input Dims: {reprlib.repr(shape)} has no number of elements up to {MOST:,}")
    return int(elements)


def _operand(args: Mapping[str, Any]) -> int:
    """Return the number for the dtype of an operator's first operands."""
    types = args.get("Input type")
    for each in types[:3] if isinstance(types, list) else ():
        word = each.lower() if isinstance(each, str) else ""
        if word in _BITS or "float8" in word:
            return _BITS.get(word, 3)
    return 0


# ---- the rank


@dataclass(frozen=True)
class RankIdentity:
    """A rank as its file tells it."""

    rank: int | None  # in the world, not a device number; None if unknown
    world_size: int | None
    groups: dict[str, tuple[int, ...]]  # the ranks of each process group that is listed in full, by its name
    axes: dict[str, str]  # the mesh axis of each process group that a DeviceMesh made
    device: str  # the name of its GPU; "" without one
    source: str  # the file's name

    @property
    def world(self) -> tuple[int, ...]:
        """All ranks of the run, as far as they are known to exist."""
        return tuple(range(self.world_size or 0)) or (() if self.rank is None else (self.rank,))


def read_header(header: Mapping[str, Any], path: Path, device: str = "0") -> RankIdentity:
    """Read the rank's identity from a file's header, else from its name; its kernels ran on the GPU `device`.

    >>> one = read_header({"distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8}}, Path("trace.json"))
    >>> one.rank, one.world_size
    (3, 8)
    >>> read_header({}, Path("rank12.json")).rank, read_header({}, Path("trace.json")).rank
    (12, None)
    """
    said = _parsed(header.get("distributedInfo"), dict)
    rank, world = _rank_number(said.get("rank")), _rank_number(said.get("world_size"))
    if rank is None and not said and (found := _IN_NAME.search(path.name)):
        rank = int(found[1])
    groups: dict[str, tuple[int, ...]] = {}
    axes: dict[str, str] = {}
    for group in _parsed(said.get("pg_config"), list):
        if not isinstance(group, dict):
            continue
        name, ranks, words = text_of(group.get("pg_name")), group.get("ranks"), text_of(group.get("pg_desc"))
        numbers = [_rank_number(each) for each in ranks] if isinstance(ranks, list) else [None]
        if None not in numbers and _rank_number(group.get("pg_size")) in (None, len(numbers)):
            groups[name] = tuple(sorted(number for number in numbers if number is not None))
        if words.startswith("mesh_"):
            axes[name] = words.removeprefix("mesh_")
    devices = [each for each in _parsed(header.get("deviceProperties"), list) if isinstance(each, dict)]
    names = {text_of(each.get("id")): text_of(each.get("name")) for each in devices}
    # Ranks that see one GPU may list it by another id.
    gpu = names.get(device, next(iter(names.values())) if len(names) == 1 else "")
    return RankIdentity(rank, world, groups, axes, gpu, path.name)


def _parsed(value: Any, kind: type[Any]) -> Any:
    """Return a mapping or a list of the header, which may be text (JSON or Python's); an empty one if it is neither."""
    if isinstance(value, str) and len(value) < 1_000_000:
        for read in (read_json, ast.literal_eval):
            try:
                value = read(value)
                break
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # it was cut short
                continue
    return value if isinstance(value, kind) else kind()


def _rank_number(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number <= MOST_RANKS else None
