"""Which samples of a batch are tried, and in which parts."""

from __future__ import annotations

from mpkit.parallel.microbatch import share, split
from mpkit.plan import Plan

__all__ = ["Parts", "dealt", "division"]

Parts = list[list[int]]
"""The numbers of the samples in each part."""

CHEAP = 1e10
"""FLOPs of a probe that nobody notices."""

FEW, MANY_PARTS = 64, 16
"""Samples of a batch that is tried whole, and parts that it may have."""


def division(size: int, plan: Plan, flops: float) -> tuple[int, int, int]:
    """Return how many samples are tried, in how many micro-batches, on how many replicas.

    The whole batch, divided as the plan does, wherever that is cheap: which samples meet in a part decides what a
    layer that mixes them makes of it. Else a few samples, in parts of unequal size, odd or even as the batch is.

    Args:
        size: samples in the batch.
        plan: of the training.
        flops: of the forward of one sample.

    >>> division(8, Plan.ddp(2), 100.0), division(1000, Plan.gpipe(4, 8), 100.0), division(9, Plan.ddp(2), 1e9)
    ((8, 1, 2), (6, 2, 1), (2, 1, 2))
    """
    micro, replicas = plan.microbatches, plan.dp
    if size <= FEW and micro * replicas <= MANY_PARTS and 6 * flops * size <= CHEAP:
        return size, micro, replicas
    micro, replicas = min(micro, 2), min(replicas, 2)
    wanted = min(size, 2 * micro * replicas + (1 if size % 2 else 2))
    if 6 * flops * wanted > CHEAP:
        wanted = min(size, max(2, micro * replicas))
    return wanted, micro, replicas


def dealt(samples: int, microbatches: int, replicas: int) -> Parts:
    """The samples of each part, as `mpkit.parallel.feed` shares them out; without those that are stand-ins.

    >>> dealt(5, 2, 2)
    [[0, 2], [1], [3], [4]]
    """
    return [
        list(range(samples)[share(start, end, rank, replicas)])
        for start, end in split(samples, min(microbatches, samples))
        for rank in range(replicas)
        if start + rank < end
    ]
