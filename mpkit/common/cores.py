"""The number of CPU cores that this process may use."""

from __future__ import annotations

import os

__all__ = ["cores"]


def cores() -> int:
    """Return the number of cores that this process may run on, which containers and `taskset` limit.

    >>> 1 <= cores() <= os.cpu_count()
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
