"""Arithmetic of single numbers and of arrays alike: a formula is written once, for a plan and for a hundred thousand.

Operators work on both. What Python says with `if`, `max` and `min` is said here; of single numbers these stay Python's
own, which are ten times as fast as arrays of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Numbers", "call_distinct", "larger", "log2", "rows_at", "smaller", "take", "where"]

Numbers: TypeAlias = Any
"""A number, or an array of them: one for each plan, and before that axis perhaps one for each stage."""


def where(condition: Numbers, yes: Numbers, no: Numbers) -> Numbers:
    """Return one number where a condition holds, and another one elsewhere.

    >>> where(2 > 1, 5, 6), where(np.array([True, False]), 5, 6).tolist()
    (5, [5, 6])
    """
    return np.where(condition, yes, no) if isinstance(condition, np.ndarray) else yes if condition else no


def larger(a: Numbers, b: Numbers) -> Numbers:
    """Return the larger number."""
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)


def smaller(a: Numbers, b: Numbers) -> Numbers:
    """Return the smaller number."""
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)


def log2(a: Numbers) -> Numbers:
    """Return the logarithm to base 2."""
    return np.log2(a) if isinstance(a, np.ndarray) else math.log2(a)


def take(values: Numbers, rows: Any) -> Numbers:
    """Return the values of some plans: an array's last axis has one per plan, and a number is that of all plans."""
    if not isinstance(values, np.ndarray):
        return values
    return values[rows] if values.ndim == 1 else values[..., rows]


def rows_at(values: Numbers, place: Numbers) -> Numbers:
    """Return along the first axis the value at a place, or at each plan's own place.

    >>> rows_at(np.array([[1, 2], [3, 4]]), np.array([1, 0])).tolist(), rows_at(np.array([1, 2]), 1)
    ([3, 2], np.int64(2))
    """
    if not isinstance(place, np.ndarray):
        return values[place]
    return np.take_along_axis(np.broadcast_to(values, (len(values), *place.shape)), place[None], 0)[0]


def call_distinct(function: Callable[..., Any], *columns: Any) -> tuple[Sequence[Any], NDArray[np.int64]]:
    """Return what a function returns of each distinct row of some columns, and for each row which of these is its.

    >>> values, which = call_distinct(lambda a, b: a + b, np.array([1, 2, 1]), 10)
    >>> values, which.tolist()
    ([11, 12], [0, 1, 0])
    """
    known: dict[tuple[Any, ...], int] = {}
    rows = zip(*(np.atleast_1d(column).tolist() for column in np.broadcast_arrays(*columns)), strict=True)
    which = np.array([known.setdefault(row, len(known)) for row in rows], np.int64)
    return [function(*row) for row in known], which
