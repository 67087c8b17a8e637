"""Two sides in the same processes, a step of one and then a step of the other: what a ratio is made of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["Step", "compared", "pairs"]

Step = Callable[[int], None]


def pairs(ours: Step, theirs: Step, rounds: int, warm_up: int) -> list[tuple[float, float]]:
    """Seconds of a step of ours and of theirs, a pair a round; a step begins when all ranks are there."""
    sides = ours, theirs
    found = []
    for number in range(warm_up + rounds):
        times = []
        for side in sides if number % 2 else sides[::-1]:  # whoever comes second finds other caches
            dist.barrier()
            start = time.perf_counter()
            side(number)
            times.append(time.perf_counter() - start)
        found.append((times[0], times[1]) if number % 2 else (times[1], times[0]))
    return found[warm_up:]


def compared(name: str, against: str, by_rank: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """A row of the table: the median of the slowest rank's times, and of the pairs' ratios.

    Args:
        name: of the row.
        against: what the other side is.
        by_rank: of each rank what `pairs` found.
    """
    rounds = range(len(by_rank[0]))
    ours, theirs = ([max(rank[i][side] for rank in by_rank) for i in rounds] for side in (0, 1))
    return {
        "name": name,
        "value": statistics.median(ours),
        "unit": "s",
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "against": f"of {against}: {statistics.median(theirs):.3g} s",
    }
