"""Two sides in the same processes, a step of one and then a step of the other: what a ratio is made of.

Peak memory is what torch's allocator gave out at most, from before the model is made to after the last step, as its
profiler tells; each side for itself, the median of 5 runs: what gloo's own thread happens to free last, the profiler
does not see being freed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import mpkit as mk

__all__ = ["Step", "compared", "compared_peaks", "pairs", "peak_memory"]

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


def peak_memory(make: Callable[[], Step]) -> int:
    """Bytes that the allocator gave out at most, while a side is made and goes 3 steps."""
    from torch.autograd import profiler

    with profiler.profile(profile_memory=True) as profile:
        step = make()
        for number in range(3):
            step(number)
    held = peak = 0
    for event in sorted(profile.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def compared_peaks(
    name: str, against: str, cluster: mk.Cluster, peak: Callable[..., int], which: str
) -> dict[str, Any]:
    """A row of the table: the most that a rank has held, of both sides.

    Args:
        name: of the row.
        against: what the other side is.
        cluster: where they run.
        peak: (ctx, which, "ours" or "theirs") -> bytes, by `peak_memory`.
        which: of the benchmark's sides.
    """
    mine, other = (
        statistics.median(max(cluster.run(peak, which, side)) for _ in range(5))
        for side in ("ours", "theirs")
    )
    return {
        "name": name,
        "value": mine / 1e6,
        "unit": "MB",
        "ratio": mine / other,
        "against": f"of {against}: {other / 1e6:.4g} MB",
    }
