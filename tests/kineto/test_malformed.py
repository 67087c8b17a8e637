"""Traces that are damaged in every field: each opens, with a note, or is rejected with its file and the reason."""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpkit as mk
from mpkit.errors import TraceError
from tests.kineto.program import ddp_program

NO_NUMBER = (
    float("nan"),
    float("inf"),
    -float("inf"),
    1e300,
    10**30,
    "4.0 us",
    "",
    [],
    [1],
    {"a": 1},
    [[2**40] * 3],
)
NO_TEXT = ([], [1], {"a": {"b": 1}}, [[["x"]]])
WRONG: dict[str, tuple[Any, ...]] = {
    "ts": NO_NUMBER, "dur": (*NO_NUMBER, -1), "args": (1, "x", [], [1], True), "pid": NO_TEXT, "tid": NO_TEXT,
    "cat": NO_TEXT, "name": NO_TEXT,
}  # fmt: skip
"""Of each field the values that no tool writes."""
ANY = (
    None,
    True,
    0,
    -1,
    -1.5,
    2**63,
    2**64,
    10**400,
    "x",
    "1e6",
    "²",
    "9" * 5000,
    *NO_NUMBER,
    *NO_TEXT,
    [None],
    [-1],
)

Damaged = tuple[str, bytes, bool]
"""What was damaged, the file, and whether no tool writes what it has now, which has to be said."""


def whole() -> dict[str, Any]:
    return ddp_program().json()


def kinds(events: list[dict[str, Any]]) -> list[int]:
    """Return the first event of each kind."""
    first: dict[Any, int] = {}
    for number, event in enumerate(events):
        first.setdefault((event["ph"], event.get("cat"), event.get("name")), number)
    return [*first.values()]


def deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def in_events() -> Iterator[Damaged]:
    trace = whole()
    for number in kinds(trace["traceEvents"]):
        event = trace["traceEvents"][number]
        for field in [*event, "none"]:
            read = event["ph"] == "X" and not (field in ("pid", "tid") and "stream" in event["args"])
            unheard_of = {repr(each): each for each in WRONG.get(field, ())} if read else {}
            for value, wrong in ({repr(each): each for each in ANY} | unheard_of).items():
                what = f"event {number} {field}={value[:40]}"
                yield changed(trace, what, value in unheard_of, "traceEvents", number, field, wrong)
            yield without(trace, number, field)
        for argument in event.get("args", {}):
            for wrong in (*ANY, deep(200)):
                what = f"event {number} args {argument}={wrong!r:.40}"
                yield changed(trace, what, False, "traceEvents", number, "args", argument, wrong)


def beside_events() -> Iterator[Damaged]:
    trace = whole()
    places: list[tuple[Any, ...]] = [(name,) for name in trace]
    places += [("distributedInfo", name) for name in trace["distributedInfo"]]
    places += [
        ("distributedInfo", "pg_config", 0, name) for name in ("pg_name", "pg_desc", "pg_size", "ranks")
    ]
    places += [("deviceProperties", 0, name) for name in ("id", "name")]
    for place in places:
        for wrong in (*ANY, deep(200)):
            yield changed(trace, f"{place}={wrong!r:.40}", False, *place, wrong)


def changed(trace: dict[str, Any], what: str, unheard_of: bool, *place: Any) -> Damaged:
    """Return a copy of a trace with another value at a place, whose last part is the value."""
    trace = copy.deepcopy(trace)
    at: Any = trace
    *path, last, value = place
    for step in path:
        at = at[step]
    at[last] = value
    return what, json.dumps(trace).encode(), unheard_of


def without(trace: dict[str, Any], number: int, field: str) -> Damaged:
    """Return a copy of a trace whose event of this number has no such field."""
    trace = copy.deepcopy(trace)
    trace["traceEvents"][number].pop(field, None)
    return f"event {number} without {field}", json.dumps(trace).encode(), False


def of_text() -> Iterator[Damaged]:
    """Yield files that are cut, or hold other bytes somewhere, plain and zipped; and nested ones."""
    data = json.dumps(whole()).encode()
    zipped = gzip.compress(data, mtime=0)
    draw = random.Random(31)
    for _ in range(60):
        at = draw.randrange(len(data))
        yield f"cut at {at}", data[:at], False
        byte = bytes([draw.randrange(256)])
        yield f"byte {byte!r} at {at}", data[:at] + byte + data[at + 1 :], False
        at = draw.randrange(1, len(zipped))
        yield f"zipped, cut at {at}", zipped[:at], False
        yield f"zipped, byte {byte!r} at {at}", zipped[:at] + byte + zipped[at + 1 :], False
    for levels in (100, 900, 990, 5000, 100_000):
        for start in (b'{"traceEvents": [', b'{"a": ', b'{"traceEvents": [{"ph": "X", "ts": 1, "cat": ', b""):
            yield f"{start!r} and {levels} brackets", start + b"[" * levels + b"]" * levels, False


def damaged() -> list[Damaged]:
    return [*in_events(), *beside_events(), *of_text()]


def check(path: Path, what: str, data: bytes, unheard_of: bool) -> None:
    path.write_bytes(data)
    try:
        trace = mk.open(path)
        timeline = trace.timeline()
        shown = [str(timeline), str(timeline.diagnose()), str(trace.inferred)]
        replayed = trace.timeline("8x-h100-nvlink")
    except TraceError as error:
        assert str(path) in str(error) or path.name in str(error), (what, error)
        number = re.match(r"event (\d+)", what)
        says = (
            rf"event {number[1]} \(.*\) cannot be read: |it ends a span before|its events are from"
            if number
            else ""
        )
        assert re.search(says, str(error)), (what, error)
        return
    assert all(shown), what
    assert not unheard_of or any("left out or assumed" in note for note in trace.notes), (
        what,
        trace.notes,
    )
    for spans in (timeline.spans, replayed.spans):
        assert (spans["end"] >= spans["start"]).all(), what
        assert np.isfinite(spans["end"]).all(), what


def test_two_hundred_damaged_traces(tmp_path: Path) -> None:
    for each in random.Random(200).sample(damaged(), 200):
        check(tmp_path / "rank0.json", *each)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(8))
def test_all_damaged_traces(tmp_path: Path, part: int) -> None:
    every = damaged()
    assert len(every) > 5000
    for each in every[part::8]:
        check(tmp_path / "rank0.json", *each)
