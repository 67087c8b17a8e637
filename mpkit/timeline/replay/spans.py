"""Spans: operations with their times; and spans made from records, with everything but the times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.common.safe_text import visible
from mpkit.trace import SAMPLE

Array = npt.NDArray[Any]


SPAN = np.dtype(
    [
        ("rank", "<i4"),
        ("lane", "u1"),  # trace.Lane
        ("kind", "u1"),  # trace.Kind
        ("depth", "u1"),  # 0: an action; 1 and more: a layer inside it
        ("stage", "<i4"),
        ("microbatch", "<i4"),
        ("step", "<i4"),
        ("name", "<i4"),  # index into Timeline.names
        ("start", "<f8"),  # seconds
        ("end", "<f8"),
        ("bytes", "<i8"),
        ("flops", "<f8"),
        ("peer", "<i4"),
        ("group", "<i4"),  # index into Timeline.names
        ("cause", "<i4"),  # WAIT: the row of the span whose end it waited for, -1 if unknown
        ("issued", "<f8"),  # communication: when this rank issued it (start: when it really began)
    ]
)

HELD = np.dtype(
    [
        ("time", "<f8"),  # seconds
        ("rank", "<i4"),
        ("category", "<i4"),  # index into trace.CATEGORIES
        ("total", "<i8"),  # bytes held in this category from this time on
    ]
)

DEVICE_SAMPLE = np.dtype(
    [("time", "<f8"), ("rank", "<i4"), *((name, "<f8") for name in (SAMPLE.names or ())[1:])]  # time: seconds
)


PART_SENT = np.dtype(
    [
        ("rank", "<i4"),  # who sent it
        ("step", "<i4"),
        ("group", "<i4"),  # index into Timeline.names
        ("member", "<i4"),  # to whom: a place in the group
        ("bytes", "<i8"),
    ]
)


@dataclass(repr=False)
class ReplayResult:
    """The result of a replay; see `mpkit.timeline.timeline.Timeline`, which has these fields and explains them."""

    spans: Array
    names: list[str]
    held: Array
    world_size: int
    clock: str
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    so_far: str = ""
    device_samples: Array = field(default_factory=lambda: np.zeros(0, DEVICE_SAMPLE))
    sent_parts: Array = field(default_factory=lambda: np.zeros(0, PART_SENT))

    def rank_number(self, rank: int) -> str:
        """Return the number that a rank has in its program: an imported trace may be of rank 3 alone; "?": unknown."""
        numbers = self.meta.get("imported", {}).get("ranks", [])
        return str(rank) if rank >= len(numbers) else "?" if numbers[rank] is None else str(numbers[rank])


class Names:
    """The strings of a timeline with their numbers; the empty string is 0. All of them are `visible`."""

    def __init__(self) -> None:
        self.all = [""]
        self._numbers = {"": 0}

    def number(self, name: str) -> int:
        """Return the number of a string, which is a new one if the string is new."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.all)
            self.all.append(visible(name))
        return number


class NameLines:
    """One rank's lines of names, as numbers of the timeline's names."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._numbers = np.zeros(0, np.int32)

    def extend(self, lines: Sequence[str]) -> None:
        """Take in the lines that are new since the last call; `lines` holds all of them."""
        if len(lines) > len(self._numbers):
            new = [self._names.number(name) for name in lines[len(self._numbers) :]]
            self._numbers = np.concatenate([self._numbers, np.array(new, np.int32)])

    def __getitem__(self, lines: Array) -> Array:
        """Return the numbers of these lines; the number of "?" for lines that the rank was killed before writing."""
        if len(lines) and int(lines.max()) >= len(self._numbers):
            known = np.append(self._numbers, np.int32(self._names.number("?")))
            return known[np.minimum(lines, len(self._numbers))]
        return self._numbers[lines]


def spans_of(rank: int, records: Array, lines: NameLines) -> Array:
    """Return (n,) of `SPAN` for (n,) of `OP`, without start, end, issued and cause."""
    spans = np.zeros(len(records), SPAN)
    for column in ("lane", "kind", "depth", "stage", "microbatch", "step", "bytes", "flops", "peer"):
        spans[column] = records[column]
    spans["rank"] = rank
    spans["name"] = lines[records["name"]]
    spans["group"] = lines[records["group"]]
    spans["cause"] = -1
    return spans
