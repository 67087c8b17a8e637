"""Takes the events of a file one by one, checks each field once, and adds it to the columns.

What no tool writes is a ValueError or TypeError, to which `read_events` adds the file and the event's number. What can
be left out or assumed is counted.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.errors import TraceError
from mpkit.timeline.foreign.reading.events import ANNOTATIONS, CATEGORIES, DEVICE, STEP, Events
from mpkit.timeline.foreign.reading.read import EventStream
from mpkit.timeline.foreign.reading.sound_event import count_of, is_text, show_value, text_of, time_of

__all__ = ["read_events"]

MOST_OPEN = 100_000
"""The most spans that have begun and not ended."""
LONGEST = 1e15
"""The longest time from a file's first event to its last, in us: 31 years."""
_COMMUNICATES = ("Collective name", "Process Group Name", "In msg nelems")
_CALLS = re.compile(
    r"torch::autograd::AccumulateGrad|c10d::|record_param_comms|gloo:|nccl:|rccl:|ucc:|xccl:|mpi:"
)


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
                f"{path}: event {number:,} ({show_value(event.get('name'))}) cannot be read: {error}. It is "
                f"{show_value(event):.300}"
            ) from None
    events.header = stream.header
    events.repairs = {what: count for what, count in stream.repairs.items() if count}
    events.phases = dict(reader.phases)
    try:
        reader.close()
        events.assumed = dict(reader.assumed)
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
        self._places: dict[tuple[Any, Any], int] = {}
        self._kinds: dict[str, str] = {}
        self._memory = array("q")
        self._opened: dict[tuple[str, str], list[dict[str, Any]]] = {}  # of B, until its E
        self._depth = 0
        self.phases: Counter[str] = Counter()
        self.assumed: Counter[str] = Counter()

    def take(self, event: dict[str, Any]) -> None:
        """Add an event, if it is of a kind that is drawn.

        Raises:
            ValueError, TypeError: it has something that no tool writes.
        """
        phase = event.get("ph")
        if phase == "X":
            category, name = self._text(event, "cat"), self._text(event, "name")
            word = self._kinds.get(category)
            if word is None:
                word = self._kinds[category] = CATEGORIES.get(category.lower(), "other")
            if word == "op" and category == "Operator" and name.startswith(ANNOTATIONS):
                word = "annotation"
            is_frame = word == "module" and not name.startswith("nn.Module")
            if not (
                is_frame or (word == "other" and category == "Trace") or category == "gpu_user_annotation"
            ):
                self._add(word, name, event)
        elif phase == "i" and event.get("name") == "[memory]":
            args = _args_of(event)
            if event.get("ts") is None or "Bytes" not in args:
                self.assumed["[memory] without its time or bytes, left out"] += 1
                return
            self._memory.extend((
                _ns(time_of(event, "ts")), count_of(args, "Bytes", 0), count_of(args, "Device Type", 0),
                count_of(args, "Total Allocated", -1), count_of(args, "Total Reserved", -1),
            ))  # fmt: skip
        elif phase == "B":
            self._depth += 1
            if self._depth > MOST_OPEN:
                raise ValueError(f"more than {MOST_OPEN:,} spans are open")
            _args_of(event)
            time_of(event, "ts")
            self._opened.setdefault((self._text(event, "pid"), self._text(event, "tid")), []).append(event)
        elif phase == "E":
            begun = self._opened.get((self._text(event, "pid"), self._text(event, "tid")))
            if not begun:
                self.assumed["end of a span that never began, left out"] += 1
                return
            self._depth -= 1
            began = begun.pop()
            if event.get("ts") is None or began.get("ts") is None:
                self.assumed["event without a time, left out"] += 1
                return
            took = time_of(event, "ts") - time_of(began, "ts")
            if took < 0:
                raise ValueError(f"it ends a span before that begins, which is {show_value(began):.200}")
            self._add("other", self._text(began, "name"), {**began, "dur": took})
        elif phase == "M" and event.get("name") == "process_name":
            self._events.processes[self._text(event, "pid")] = text_of(_args_of(event).get("name"))
        elif phase != "M":
            self.phases[phase if type(phase) is str else show_value(phase)] += 1

    def _text(self, event: dict[str, Any], key: str) -> str:
        """Return a name that an event has; what is none is written out, and counted."""
        value = event.get(key)
        if type(value) is str:
            return value
        if is_text(value):
            return str(value)
        self.assumed[f"{key} that is no text"] += 1
        return show_value(value)

    def _thread(self, place: tuple[Any, Any]) -> int:
        """Return the number of a process's thread, or of a device's stream, that is seen for the first time."""
        named = dict(zip(("process", "thread"), place, strict=True))
        words = self._text(named, "process"), self._text(named, "thread")
        number = self._threads.setdefault(words, len(self._threads))
        if all(map(is_text, place)):
            self._places[place] = number
        return number

    def _add(self, word: str, name: str, event: dict[str, Any]) -> None:
        if event.get("ts") is None:
            self.assumed["event without a time, left out"] += 1
            return
        if event.get("dur") is None:
            self.assumed["span without an end, taken as one of no length"] += 1
        args = _args_of(event)
        if word == "annotation" and name.startswith("ProfilerStep#") and not STEP.match(name):
            self.assumed["ProfilerStep whose number no run reaches, not taken for a step"] += 1
        place: Any = event.get("pid"), event.get("tid")
        if word in DEVICE:
            place = args.get("device", place[0]), args.get("stream", place[1])
        try:
            thread = self._places[place]
        except (KeyError, TypeError):
            thread = self._thread(place)
        number = self._names.setdefault(name, len(self._names))
        whole = (
            _CALLS.match(name) is not None
            if word in ("op", "annotation")
            else word == "kernel" and _COMMUNICATES[0] in args
        )
        ts, took = time_of(event, "ts"), time_of(event, "dur", least=0.0)
        if word == "other":
            self._events.categories.append(sys.intern(self._text(event, "cat") if "cat" in event else ""))
        self._events.tables[word].add(number, ts, took, thread, args, whole=whole)

    def close(self) -> None:
        """Put all times on ns since the first event.

        Raises:
            ValueError: they are further apart than any run is long.
        """
        events = self._events
        if left := sum(map(len, self._opened.values())):
            self.assumed["span without an end, left out"] += left
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
    args = event.get("args")
    if args is None:
        return {}
    if not isinstance(args, dict):
        raise TypeError(f"args={show_value(args)} are no names and values")
    return args


def _ns(us: float) -> int:
    """Return ns, without rounding the many digits that us since 1970 have."""
    return int(us) * 1000 + round(us % 1 * 1e3)
