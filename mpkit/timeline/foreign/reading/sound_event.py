"""Checks of an event before it is kept: a file may come from anywhere, and its numbers from anyone.

Each check raises ValueError with what is wrong; `read_events` adds the file and the event's number.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from mpkit.trace.validation import MOST_RANKS

__all__ = ["count_of", "is_text", "show_value", "sound_args", "text_of", "time_of", "whole_of"]

LATEST = 9e15
"""Latest time, in us since 1970: that of the year 2255. int64 holds as many ns."""
MOST = 2**50
"""The most elements or bytes of one call."""

_COUNTS = {
    "In msg nelems": MOST, "Out msg nelems": MOST, "Group size": MOST_RANKS, "Global rank stride": MOST_RANKS,
    "Global rank start": MOST_RANKS, "Dst Rank": MOST_RANKS, "Src Rank": MOST_RANKS, "Seq": 2**31 - 1,
}  # fmt: skip
_LISTS = ("Input Dims", "Input type", "Concrete Inputs")
_WORDS = ("Collective name", "dtype", "Process Group Name", "Process Group Description")
_SCALARS = (str, int, float)
_WHOLE = re.compile(r"[0-9]{1,15}")


def show_value(value: Any) -> str:
    """Return a value of a file as Python writes it, however long and deep it is.

    >>> show_value({"ph": "X", "args": {"a": [[[[[[[1]]]]]]], "b": "x" * 1000}})
    "{'ph': 'X', 'args': {'a': [[[[[...]]]]], 'b': 'xxxxxxxxxxxx...xxxxxxxxxxxxx'}}"
    """
    if isinstance(value, dict):  # in the order of the file
        return (
            "{" + ", ".join(f"{key!r:.60}: {reprlib.repr(each)}" for key, each in [*value.items()][:12]) + "}"
        )
    return reprlib.repr(value)


def is_text(value: Any) -> bool:
    """Say whether a value is a text, or a number, which is as good as one for a name.

    >>> is_text("stream 7"), is_text(7), is_text([7])
    (True, True, False)
    """
    return value is None or isinstance(value, _SCALARS)


def text_of(value: Any) -> str:
    """Return a name that a file has; "" for what is none.

    >>> text_of("nccl"), text_of(3), text_of(None), text_of({"a": 1})
    ('nccl', '3', '', '')
    """
    return str(value) if value is not None and is_text(value) else ""


def whole_of(text: str) -> int | None:
    """Return the number that a text consists of; None if it has anything else, or more digits than any number here.

    >>> whole_of("17"), whole_of("-1"), whole_of("9" * 20)
    (17, None, None)
    """
    return int(text) if _WHOLE.fullmatch(text) else None


def time_of(event: Mapping[str, Any], name: str, *, least: float = -LATEST) -> float:
    """Return a time of an event in us; 0 if it has none.

    >>> time_of({"ts": 2.5}, "ts"), time_of({"ts": "3"}, "ts"), time_of({}, "dur")
    (2.5, 3.0, 0.0)
    >>> time_of({"dur": -1}, "dur", least=0)
    Traceback (most recent call last):
        ...
    ValueError: dur=-1 is no time
    """
    value = event.get(name)
    if type(value) is float and least <= value <= LATEST:
        return value
    if value is None:
        return 0.0
    if isinstance(value, _SCALARS):
        try:
            time = float(value)
        except (ValueError, OverflowError):
            time = math.nan
        if least <= time <= LATEST:  # nan is not
            return time
    raise ValueError(f"{name}={show_value(value)} is no time")


def count_of(
    args: Mapping[str, Any], name: str, default: int, most: int = MOST, *, least: int | None = None
) -> int:
    """Return a whole number among an event's arguments, of this size at most.

    Args:
        args: the arguments.
        name: which of them.
        default: the number if there is none.
        most: the largest number that there can be.
        least: the smallest one; None: -most.
    """
    value = args.get(name, "")
    if value == "" or value is None:  # an empty value that was fixed
        return default
    if isinstance(value, _SCALARS):
        try:
            count = int(value)
        except (ValueError, OverflowError):
            count = most + 1
        if (-most if least is None else least) <= count <= most:
            return count
    raise ValueError(f"{name}={show_value(value)} is no number up to {most:,}")


def sound_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that communicates, after checking those that are calculated with."""
    sound = dict(args)
    for name, most in _COUNTS.items():
        if name in args:
            sound[name] = count_of(args, name, -1, most)
    for name in _LISTS:
        if not isinstance(args.get(name, []), list):
            raise ValueError(f"{name}={show_value(args[name])} is no list")
    for shape in args.get("Input Dims", []):
        _check_shape(shape)
    if "Input Dims" in args and len(args.get("Input type", args["Input Dims"])) > MOST_RANKS:
        raise ValueError("Input type is too long")
    for name in _WORDS:
        if not is_text(args.get(name)):
            raise ValueError(f"{name}={show_value(args[name])} is no name")
    for name in _LISTS[1:]:
        if name in args:
            sound[name] = [text_of(each) for each in args[name]]
    listed = args.get("Process Group Ranks", "")
    if (
        not isinstance(listed, str | list)
        or len(listed) > 8 * MOST_RANKS
        or (isinstance(listed, list) and not all(type(rank) in (int, str) for rank in listed))
    ):
        raise ValueError(f"Process Group Ranks={show_value(listed)} are no ranks")
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
            raise ValueError(f"Input Dims: {show_value(each)} is no shape")
