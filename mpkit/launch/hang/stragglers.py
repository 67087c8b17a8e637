"""Notice which rank the others wait for, where it is and whether it uses CPU time, before any rank is given up.

A rank may compute for as long as it needs (rank 0 may be evaluating), so this is not an error. The notice is printed
when a rank has waited for `NOTICE_AFTER` seconds for one that does not wait itself, or when no rank makes progress and
some use no CPU time, as ranks do that wait in ways that mpkit does not record (plain torch.distributed, locks, files).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpkit.launch.hang.progress import Sight
from mpkit.launch.process.vitals import cpu_seconds

__all__ = ["NOTICE_AFTER", "WaitWatch", "ranks_spelt", "stopped_words"]

NOTICE_AFTER = 10.0
"""Seconds that ranks wait before the notice is printed."""

IDLE = 0.05
"""Share of a core below which a rank is considered not to compute."""


@dataclass
class WaitWatch:
    """Watches which ranks wait for which.

    Args:
        after: seconds of waiting before the notice.
    """

    after: float = NOTICE_AFTER
    _since: list[tuple[Sight, float]] = field(
        default_factory=list
    )  # by rank: the latest sight, and when it was first seen
    _cpu: deque[tuple[float, list[float | None]]] = field(default_factory=lambda: deque(maxlen=4))

    def look(self, sights: Sequence[Sight], pids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return (ranks that wait, ranks that they wait for), both empty as long as there is nothing to report."""
        now = time.monotonic()
        if not self._since:
            self._since = [(sight, now) for sight in sights]
        self._since = [
            old if old[0] == sight else (sight, now) for old, sight in zip(self._since, sights, strict=True)
        ]
        if pids and (not self._cpu or now - self._cpu[-1][0] > self.after / 4):
            self._cpu.append((now, [cpu_seconds(pid) for pid in pids]))
        going = [rank for rank, sight in enumerate(sights) if sight.state == 0]
        waiting = [r for r in going if sights[r].waiting and now - self._since[r][1] > self.after]
        others = [rank for rank in going if not sights[rank].waiting]
        if waiting:
            return (waiting, others) if others else ([], [])
        if not pids or any(now - self._since[rank][1] <= self.after for rank in going):
            return [], []
        idle = [rank for rank in going if (self.cpu_share(rank, pids) or 0.0) < IDLE]
        starting = [rank for rank in going if not sights[rank].started]
        if starting and idle:
            return ([rank for rank in idle if sights[rank].started] or starting, starting)
        return (idle, [r for r in going if r not in idle] or idle) if idle else ([], [])

    def cpu_share(self, rank: int, pids: Sequence[int]) -> float | None:
        """Return the number of cores that the rank has used lately; None where the system does not report it."""
        if not self._cpu:  # `look` has not been called since the ranks were started
            return None
        then, before = self._cpu[0]
        now, earlier, used = time.monotonic(), before[rank], cpu_seconds(pids[rank])
        return None if earlier is None or used is None or now <= then else (used - earlier) / (now - then)


def ranks_spelt(ranks: Sequence[int]) -> str:
    """Return a phrase such as "rank 1" or "ranks 0, 2 and 3".

    >>> ranks_spelt([1]), ranks_spelt([0, 2, 3])
    ('rank 1', 'ranks 0, 2 and 3')
    """
    words = [str(rank) for rank in ranks]
    return f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"


def stopped_words(rank: int, pid: int) -> str:
    """Return what to report about a rank stopped by SIGSTOP, with the command that continues it."""
    return f"rank {rank} is stopped (SIGSTOP, or a debugger): kill -CONT {pid}"
