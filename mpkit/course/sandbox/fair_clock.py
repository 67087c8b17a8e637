"""A clock for limits on programs that share their machine with others: it stands still while they wait for a core.

    time passes    while none of the processes is ready to run and left without a core, whether they compute, sleep or
                   wait for each other
    it slows down  by the largest share of the time that one of them spent in the queue for a core, as the others may
                   wait for that one
    and it runs    as fast as all of them together use the machine's cores, so that many processes cannot slow the clock
                   by crowding each other out

Linux says how long a process has queued (`/proc/PID/schedstat`). Where nobody says so, this is the wall clock.
"""

import time
from collections.abc import Iterable

from mpkit.common.process_wide import cores
from mpkit.launch.process.processes import cpu_seconds


class FairClock:
    """The time that processes had, as far as their machine let them run.

    Attributes:
        seconds: the time since the clock was made, as of the last look.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked = time.monotonic()
        self._seen: dict[int, tuple[float, float]] = {}

    def look(self, pids: Iterable[int]) -> float:
        """Let the time pass that these processes had since the last look; return `seconds`."""
        now, seen = time.monotonic(), {pid: (cpu_seconds(pid) or 0.0, _queued_time(pid)) for pid in pids}
        wall, self._looked = now - self._looked, now
        changes = [
            (cpu - self._seen[pid][0], queued - self._seen[pid][1])
            for pid, (cpu, queued) in seen.items()
            if pid in self._seen
        ]
        longest = max((queued for _, queued in changes), default=0.0)
        used = sum(cpu for cpu, _ in changes) / cores()
        self.seconds += min(wall, max(wall - longest, used))
        self._seen = seen
        return self.seconds


def _queued_time(pid: int) -> float:
    """Return the seconds that a process's main thread has waited for a core; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
