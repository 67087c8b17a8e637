"""What the system says of a process: does it run, sleep, or is it stopped; how much CPU time has it used."""

from __future__ import annotations

import os

__all__ = ["cpu_seconds", "is_stopped"]

STOPPED = ("T", "t")
"""States of a process that SIGSTOP, or a debugger, holds."""


def is_stopped(pid: int) -> bool:
    """Return whether the process is held by SIGSTOP or a debugger; False where the system does not say."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in STOPPED


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of all threads of the process; None where the system does not say."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:  # gone, or not Linux
        return []
