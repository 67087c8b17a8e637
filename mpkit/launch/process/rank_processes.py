"""The ranks' processes as the launching process knows them: ids, exits, signals, what the system reports of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass, field

__all__ = ["RankProcesses", "cpu_seconds", "is_stopped"]


@dataclass
class RankProcesses:
    """The processes of one launch, which the fork server starts and reaps.

    Attributes:
        pids: process ids by rank; empty until the ranks are started.
        statuses: exit statuses by rank, in the order in which the ranks ended; a negative status is a signal.
    """

    pids: list[int] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    _cpu: dict[tuple[int, bool], float] = field(default_factory=dict)

    def stopped_pids(self) -> dict[int, int]:
        """Return the process ids, by rank, of the ranks stopped by SIGSTOP."""
        return {rank: pid for rank, pid in enumerate(self.pids) if is_stopped(pid)}

    def running_ranks(self, waiting: Collection[int] = ()) -> set[int]:
        """Return the ranks that the system reports as runnable, or that used CPU time since the last call.

        Args:
            waiting: ranks that wait for others in a recorded call, or have finished. Of these the main thread counts
                alone: gloo's own thread can spin for ever on a connection whose other end is gone.
        """
        found = set()
        for rank, pid in enumerate(self.pids):
            key = rank, rank in waiting
            vitals = vitals_of(pid, main_thread=key[1]) if self.runs(rank) else None
            if vitals is not None:
                state, cpu = vitals
                if state == "R" or cpu > self._cpu.get(key, cpu):
                    found.add(rank)
                self._cpu[key] = cpu
        return found

    def runs(self, rank: int) -> bool:
        """Return whether a rank has been started and has not exited."""
        return rank < len(self.pids) and rank not in self.statuses

    def kill(self) -> None:
        """Kill those that have not exited, and what they have started, without the fork server's help."""
        living = [pid for rank, pid in enumerate(self.pids) if rank not in self.statuses]
        if living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pids[0], signal.SIGKILL)
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def vitals_of(pid: int, main_thread: bool = False) -> tuple[str, float] | None:
    """Return the letter of a process's state and the CPU seconds that it has used.

    The letter is that of /proc/PID/stat: "R" on a core or in the queue for one, "T" or "t" stopped by SIGSTOP or a
    debugger. None: it has exited, or the system does not report it.

    Args:
        pid: the process.
        main_thread: on Linux, of its main thread alone.
    """
    if sys.platform != "linux":
        return _ask_psutil(pid)
    try:
        with open(f"/proc/{pid}/task/{pid}/stat" if main_thread else f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by SIGSTOP or a debugger; False where the system does not report it."""
    vitals = vitals_of(pid)
    return vitals is not None and vitals[0] in ("T", "t")


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds used by all threads of the process; None where the system does not report it."""
    vitals = vitals_of(pid)
    return None if vitals is None else vitals[1]


def _ask_psutil(pid: int) -> tuple[str, float] | None:
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
    return state, times.user + times.system
