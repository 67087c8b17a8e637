"""How far this process's clock is from rank 0's: Cristian's algorithm over the store.

Each process in turn sends rank 0 a few pings. Rank 0 answers with its clock's time, which is taken to be that of the
middle of the round trip. Of several round trips the shortest is used; the offset is wrong by at most half of it.
(F. Cristian, Probabilistic clock synchronization, 1989.)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Offset", "answer_pings", "measure_offset"]

PINGS = 8
LIMIT = timedelta(seconds=60)


@dataclass(frozen=True)
class Offset:
    """What is to be added to a process's times, in ns, to have them on rank 0's clock.

    Attributes:
        ns: rank 0's clock minus this process's.
        residual: the largest error of that, in ns: half of the shortest round trip.
    """

    ns: int = 0
    residual: int = 0


def measure_offset(store: Store, rank: int, round: str, now: Callable[[], int] = time.monotonic_ns) -> Offset:
    """Return the offset of this process's clock, while rank 0 runs `answer_pings`.

    Args:
        store: the store that both share.
        rank: this process's rank.
        round: a name for this measurement, the same on rank 0.
        now: this process's clock, in ns.
    """
    best: Offset | None = None
    for number in range(PINGS):
        key = f"ping{round}.{rank}.{number}"
        sent = now()
        store.set(key, "?")
        store.wait([f"{key}.answer"], LIMIT)
        came = now()
        theirs = int(store.get(f"{key}.answer"))
        trip = came - sent
        if best is None or trip // 2 < best.residual:
            best = Offset(theirs - (sent + came) // 2, trip // 2)
        store.delete_key(f"{key}.answer")
    assert best is not None
    store.set(f"offset{round}.{rank}", json.dumps([best.ns, best.residual]))
    return best


def answer_pings(
    store: Store, ranks: Iterable[int], round: str, now: Callable[[], int] = time.monotonic_ns
) -> dict[int, Offset]:
    """Answer the pings of these ranks, one after the other, and return their offsets. Rank 0 calls this."""
    offsets = {}
    for rank in ranks:
        for number in range(PINGS):
            key = f"ping{round}.{rank}.{number}"
            store.wait([key], LIMIT)
            store.set(f"{key}.answer", str(now()))
            store.delete_key(key)
        store.wait([f"offset{round}.{rank}"], LIMIT)
        offsets[rank] = Offset(*json.loads(store.get(f"offset{round}.{rank}")))
    return offsets
