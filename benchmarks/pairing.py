"""Two sides in the same processes, alternating step by step: the measurements behind a ratio.

Peak memory is the most that torch's allocator held (`benchmarks.allocator`), from before the model is made until after
the last step. Each side is measured on its own, as the median of 5 runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import mpkit as mk
from benchmarks.allocator import peak_of

Step = Callable[[int], None]
Row = dict[str, Any]


def row(name: str, value: float, unit: str, ratio: float | None = None, against: str = "") -> Row:
    """Return a row of the table: what was measured, and its ratio to what it is measured against."""
    return {"name": name, "value": value, "unit": unit, "ratio": ratio, "against": against}


def pairs(ours: Step, theirs: Step, rounds: int, warm_up: int) -> list[tuple[float, float]]:
    """Return the seconds of a step of ours and of theirs, one pair per round; all ranks begin a step together."""
    sides = ours, theirs
    found = []
    for number in range(warm_up + rounds):
        times = []
        for side in sides if number % 2 else sides[::-1]:  # the side that runs second finds other caches
            dist.barrier()
            start = time.perf_counter()
            side(number)
            times.append(time.perf_counter() - start)
        found.append((times[0], times[1]) if number % 2 else (times[1], times[0]))
    return found[warm_up:]


def compared(name: str, against: str, by_rank: list[list[tuple[float, float]]]) -> Row:
    """Return a row of the table: the median of the slowest rank's times, and the median of the pairs' ratios.

    Args:
        name: the name of the row.
        against: what the other side is.
        by_rank: for each rank, what `pairs` returned.
    """
    rounds = range(len(by_rank[0]))
    ours, theirs = ([max(rank[i][side] for rank in by_rank) for i in rounds] for side in (0, 1))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return row(name, statistics.median(ours), "s", ratio, f"of {against}: {statistics.median(theirs):.3g} s")


def peak_memory(make: Callable[[], Step]) -> int:
    """Return the most bytes that the allocator held while a side is made and runs 3 steps."""

    def run() -> None:
        step = make()
        for number in range(3):
            step(number)

    return peak_of(run).most


def compared_peaks(name: str, against: str, cluster: mk.Cluster, peak: Callable[..., int], which: Any) -> Row:
    """Return a row of the table: the peak memory of the rank that holds the most, for both sides.

    Args:
        name: the name of the row.
        against: what the other side is.
        cluster: the cluster on which they run.
        peak: (ctx, which, "ours" or "theirs") -> bytes, as from `peak_memory`.
        which: the configuration of the benchmark to measure.
    """
    mine, other = (
        statistics.median(max(cluster.run(peak, which, side)) for _ in range(5))
        for side in ("ours", "theirs")
    )
    return row(name, mine / 1e6, "MB", mine / other, f"of {against}: {other / 1e6:.4g} MB")
