"""The ranks' processes as the launching process knows them: ids, exits, signals."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from dataclasses import dataclass, field

from mpkit.launch.process.vitals import is_stopped, vitals_of

__all__ = ["RankProcesses"]


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
                if vitals.state == "R" or vitals.cpu > self._cpu.get(key, vitals.cpu):
                    found.add(rank)
                self._cpu[key] = vitals.cpu
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
