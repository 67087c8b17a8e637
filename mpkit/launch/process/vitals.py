"""What the system reports about a process: whether it is stopped, and how much CPU time it has used."""

from __future__ import annotations

import os

__all__ = ["cpu_seconds", "is_stopped"]

STOPPED = ("T", "t")
"""States of a process that is stopped by SIGSTOP or a debugger."""


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by SIGSTOP or a debugger; False where the system does not report it."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in STOPPED


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds used by all threads of the process; None where the system does not report it."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:  # the process has exited, or this is not Linux
        return []
