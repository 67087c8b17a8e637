"""This process: how many CPU cores it may use, and its memory closed to other processes of the same user."""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["cores", "make_undumpable"]


def cores() -> int:
    """Return the number of cores that this process may run on, which containers and `taskset` limit.

    >>> 1 <= cores() <= os.cpu_count()
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_undumpable() -> None:
    """Close this process's memory and open files to other processes of this user, and to children (Linux only).

    Without it, any process of the same user may open `/proc/PID/mem` and `/proc/PID/fd`. Root still may. Children
    inherit it until they call exec. The process writes no core dump.
    """
    if sys.platform == "linux":
        pr_set_dumpable = 4
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_dumpable, 0, 0, 0, 0)
