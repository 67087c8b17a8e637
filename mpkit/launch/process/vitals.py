"""What the system reports about a process: whether it is stopped or runs, and how much CPU time it has used."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

__all__ = ["Vitals", "cpu_seconds", "is_stopped", "vitals_of"]


@dataclass(frozen=True)
class Vitals:
    """A process at one moment.

    Attributes:
        state: the letter in /proc/PID/stat: "R" if it is on a core or in the queue for one, "T" or "t" if it is
            stopped by SIGSTOP or a debugger.
        cpu: the CPU seconds used by all of its threads, or by the main thread alone.
    """

    state: str
    cpu: float


def vitals_of(pid: int, main_thread: bool = False) -> Vitals | None:
    """Return what the system reports about the process; None if it has exited, or the system reports nothing.

    Args:
        pid: the process.
        main_thread: on Linux, the state and CPU time of its main thread alone.
    """
    if sys.platform != "linux":
        return _ask_psutil(pid)
    try:
        with open(f"/proc/{pid}/task/{pid}/stat" if main_thread else f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return Vitals(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by SIGSTOP or a debugger; False where the system does not report it."""
    found = vitals_of(pid)
    return found is not None and found.state in ("T", "t")


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds used by all threads of the process; None where the system does not report it."""
    found = vitals_of(pid)
    return None if found is None else found.cpu


def _ask_psutil(pid: int) -> Vitals | None:
    """Return the same on other systems, if psutil is there. Never "R": macOS says so of processes that sleep."""
    try:
        import psutil
    except ImportError:
        return None
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        state = "T" if process.status() == psutil.STATUS_STOPPED else ""
    except psutil.Error:
        return None
    return Vitals(state, times.user + times.system)
