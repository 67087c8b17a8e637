"""Which steps of a run are verified: `verify=` of `Cluster.train`."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["check_verify", "verified_steps"]

WORKS = 'verify="first" (the default: two steps and a later one), "all", (1, 10) or False'


def check_verify(verify: Any) -> Any:
    """Return a valid `verify=`, with step numbers as a tuple.

    >>> check_verify([3, 1])
    (1, 3)

    Raises:
        ValueError: it is neither "first", "all", False, nor numbers of steps, which count from 1.
    """
    if verify in ("first", "all") or verify is False:
        return verify
    numbers = list(verify) if isinstance(verify, (tuple, list, set, range)) else [verify]
    if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
        raise ValueError(f"verify={verify!r}: steps are counted from 1. What works: {WORKS}")
    return tuple(sorted(set(numbers)))


def verified_steps(verify: Any, first: int, steps: int) -> tuple[int, ...]:
    """Return the steps that are verified, counted from 0.

    >>> verified_steps((1, 10), 0, 5), verified_steps("all", 3, 5), len(verified_steps("first", 0, 50))
    ((0,), (3, 4), 3)

    Args:
        verify: what `check_verify` returned.
        first: the first step of the run, counted from 0.
        steps: the number of steps, counted from the very beginning.
    """
    if verify is False:
        return ()
    if verify == "all":
        return tuple(range(first, steps))
    if verify != "first":
        return tuple(n - 1 for n in verify if first <= n - 1 < steps)
    later = range(first + 2, steps)
    drawn = [random.SystemRandom().choice(later)] if later else []
    return (*range(first, min(first + 2, steps)), *drawn)
