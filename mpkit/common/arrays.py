"""Arithmetic on single numbers and on arrays: a formula is written once, for a plan and for a hundred thousand.

Operators work on both; these functions replace Python's `if`, `max` and `min`. Single numbers stay Python's own, which
are ten times as fast as arrays of one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""An array of numbers, or of records such as the ops of a trace and the spans of a timeline."""

Numbers: TypeAlias = Any
"""A number, or an array of one for each plan."""


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
    """Return the values of some plans: an array has one for each, and a number is for all."""
    return values[rows] if isinstance(values, np.ndarray) else values


def at_largest(keys: Sequence[Numbers], *columns: Sequence[Numbers]) -> list[Numbers]:
    """Return each column's value beside the largest key: for one plan, or for each of many.

    >>> at_largest([1, 3, 2], [5, 6, 7]), at_largest([np.array([1, 4]), np.array([3, 2])], [5, 6])[0].tolist()
    ([6], [6, 5])
    """
    if not any(isinstance(key, np.ndarray) for key in keys):
        place = keys.index(max(keys))
        return [column[place] for column in columns]
    places = np.argmax(np.broadcast_arrays(*keys), axis=0)
    return [np.choose(places, list(column)) for column in columns]


def call_distinct(function: Callable[..., Any], *columns: Any) -> tuple[Sequence[Any], NDArray[np.int64]]:
    """Return a function's values for the distinct rows of some columns, and the number of its value for each row.

    >>> values, which = call_distinct(lambda a, b: a + b, np.array([1, 2, 1]), 10)
    >>> values, which.tolist()
    ([11, 12], [0, 1, 0])
    """
    known: dict[tuple[Any, ...], int] = {}
    rows = zip(*(np.atleast_1d(column).tolist() for column in np.broadcast_arrays(*columns)), strict=True)
    which = np.array([known.setdefault(row, len(known)) for row in rows], np.int64)
    return [function(*row) for row in known], which
