"""Which rank do the others wait for, where is it, and does it use CPU time: one line, before anything is given up.

A rank may compute for as long as it wants (rank 0 may evaluate), so this is no error. It is said when a rank has waited
for `NOTICE_AFTER` seconds for one that does not wait itself, or when nothing moves and some ranks use no CPU time,
which is how ranks look that wait in ways that mpkit does not record (plain torch.distributed, locks, files).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpkit.launch.vitals import cpu_seconds
from mpkit.launch.watch import Sight

__all__ = ["NOTICE_AFTER", "Waiting", "ranks_spelt", "stopped_words"]

NOTICE_AFTER = 10.0
"""Seconds that ranks wait before it is said for whom."""

IDLE = 0.05
"""Of a core: who uses less does not compute."""


@dataclass
class Waiting:
    """Watches who waits for whom.

    Args:
        after: seconds before it is said.
    """

    after: float = NOTICE_AFTER
    _since: list[tuple[Sight, float]] = field(
        default_factory=list
    )  # by rank: the latest sight, first seen when
    _cpu: deque[tuple[float, list[float | None]]] = field(default_factory=lambda: deque(maxlen=4))

    def look(self, sights: Sequence[Sight], pids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return (ranks that wait, ranks that they wait for), both empty as long as there is nothing to say."""
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
        return (idle, [r for r in going if r not in idle] or idle) if idle else ([], [])

    def cpu_share(self, rank: int, pids: Sequence[int]) -> float | None:
        """Return of how many cores the rank has made use lately; None where the system does not say."""
        if not self._cpu:  # nobody has looked since the ranks were started
            return None
        then, before = self._cpu[0]
        now, earlier, used = time.monotonic(), before[rank], cpu_seconds(pids[rank])
        return None if earlier is None or used is None or now <= then else (used - earlier) / (now - then)


def ranks_spelt(ranks: Sequence[int]) -> str:
    """Return such as "rank 1" or "ranks 0, 2 and 3".

    >>> ranks_spelt([1]), ranks_spelt([0, 2, 3])
    ('rank 1', 'ranks 0, 2 and 3')
    """
    words = [str(rank) for rank in ranks]
    return f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"


def stopped_words(rank: int, pid: int) -> str:
    """Return what to say of a rank that SIGSTOP holds, with the command that lets it go on."""
    return f"rank {rank} is stopped (SIGSTOP, or a debugger): kill -CONT {pid}"
