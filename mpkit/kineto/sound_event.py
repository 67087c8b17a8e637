"""Checks of an event before it is kept: a file may come from anywhere, and its numbers from anyone.

Each check raises ValueError with what is wrong; `read_events` adds the file and the event's number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpkit.trace.sound import MOST_RANKS

__all__ = ["count_of", "sound_args", "time_of"]

LATEST = 9e15
"""Latest time, in us since 1970: that of the year 2255. int64 holds as many ns."""
MOST = 2**50
"""The most elements or bytes of one call."""

_COUNTS = {
    "In msg nelems": MOST, "Out msg nelems": MOST, "Group size": MOST_RANKS, "Global rank stride": MOST_RANKS,
    "Global rank start": MOST_RANKS, "Dst Rank": MOST_RANKS, "Src Rank": MOST_RANKS, "Seq": 2**31 - 1,
}  # fmt: skip
_LISTS = ("Input Dims", "Input type", "Concrete Inputs")


def time_of(event: Mapping[str, Any], name: str, *, least: float = -LATEST) -> float:
    """Return a time of an event in us; 0 if it has none.

    >>> time_of({"ts": 2.5}, "ts"), time_of({"ts": "3"}, "ts"), time_of({}, "dur")
    (2.5, 3.0, 0.0)
    >>> time_of({"dur": -1}, "dur", least=0)
    Traceback (most recent call last):
        ...
    ValueError: dur=-1 is no time
    """
    value = event.get(name) or 0
    if isinstance(value, str | int | float):
        try:
            time = float(value)
        except (ValueError, OverflowError):
            time = math.nan
        if least <= time <= LATEST:  # nan is not
            return time
    raise ValueError(f"{name}={value!r:.60} is no time")


def count_of(args: Mapping[str, Any], name: str, default: int, most: int = MOST) -> int:
    """Return a whole number among an event's arguments, of this size at most; negative ones mean that there is none."""
    value = args.get(name, default) or 0
    if isinstance(value, str | int | float):
        try:
            count = int(value)
        except (ValueError, OverflowError):
            count = most + 1
        if -most <= count <= most:
            return count
    raise ValueError(f"{name}={value!r:.60} is no number up to {most:,}")


def sound_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that communicates, after checking those that are calculated with."""
    sound = dict(args)
    for name, most in _COUNTS.items():
        if name in args:
            sound[name] = count_of(args, name, -1, most)
    for name in _LISTS:
        if not isinstance(args.get(name, []), list):
            raise ValueError(f"{name}={args[name]!r:.60} is no list")
    for shape in args.get("Input Dims", []):
        _check_shape(shape)
    if "Input Dims" in args and len(args.get("Input type", args["Input Dims"])) > MOST_RANKS:
        raise ValueError("Input type is too long")
    listed = args.get("Process Group Ranks", "")
    if not isinstance(listed, str | list) or len(listed) > 8 * MOST_RANKS:
        raise ValueError(f"Process Group Ranks={listed!r:.60} are no ranks")
    return sound


def _check_shape(shape: Any) -> None:
    """Check that a shape, or a list of shapes, is of a tensor that there can be."""
    shapes = shape if isinstance(shape, list) and shape and isinstance(shape[0], list) else [shape]
    for each in shapes:
        lengths = each if isinstance(each, Sequence) and not isinstance(each, str) else [-1]
        if (
            not all(type(length) is int and 0 <= length <= MOST for length in lengths)
            or math.prod(lengths) > MOST
        ):
            raise ValueError(f"Input Dims: {each!r:.60} is no shape")
