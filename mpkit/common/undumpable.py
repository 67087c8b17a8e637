"""A process that no other process of the same user can read, change or trace."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["make_undumpable"]


def make_undumpable() -> None:
    """Close this process's memory and open files to other processes of this user, and to children (Linux only).

    Without it, any process of the same user may open `/proc/PID/mem` and `/proc/PID/fd`. Root still may. Children
    inherit it until they call exec. The process writes no core dump.
    """
    if sys.platform == "linux":
        pr_set_dumpable = 4
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_dumpable, 0, 0, 0, 0)
