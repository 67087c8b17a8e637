"""Spans from records: everything of an op but its times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline import SPAN
from mpkit.visible import visible

__all__ = ["Lines", "Names", "spans_of"]

Array = npt.NDArray[Any]


class Names:
    """The strings of a timeline, each with its number; the empty one is 0. All of them are `visible`."""

    def __init__(self) -> None:
        self.all = [""]
        self._numbers = {"": 0}

    def number(self, name: str) -> int:
        """The number of a string, which is new if the string is."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.all)
            self.all.append(visible(name))
        return number


class Lines:
    """One rank's lines of names, as numbers of the timeline's."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._numbers = np.zeros(0, np.int32)

    def extend(self, lines: Sequence[str]) -> None:
        """Take note of all the lines that there are by now."""
        if len(lines) > len(self._numbers):
            new = [self._names.number(name) for name in lines[len(self._numbers) :]]
            self._numbers = np.concatenate([self._numbers, np.array(new, np.int32)])

    def __getitem__(self, lines: Array) -> Array:
        """The numbers of these lines; that of "?" for lines the rank was killed before it wrote."""
        if len(lines) and int(lines.max()) >= len(self._numbers):
            known = np.append(self._numbers, np.int32(self._names.number("?")))
            return known[np.minimum(lines, len(self._numbers))]
        return self._numbers[lines]


def spans_of(rank: int, records: Array, lines: Lines) -> Array:
    """(n,) of `SPAN` for (n,) of `OP`, without start, end, issued and cause."""
    spans = np.zeros(len(records), SPAN)
    for column in ("lane", "kind", "depth", "stage", "microbatch", "step", "bytes", "flops", "peer"):
        spans[column] = records[column]
    spans["rank"] = rank
    spans["name"] = lines[records["name"]]
    spans["group"] = lines[records["group"]]
    spans["cause"] = -1
    return spans
