"""Which samples of a batch are tried, and in which parts."""

from __future__ import annotations

from mpkit.strategies.data.microbatch import share, split

__all__ = ["Parts", "division", "scatter_samples"]

Parts = list[list[int]]
"""The numbers of the samples in each part."""

CHEAP = 1e10
"""FLOPs of a probe that takes no noticeable time."""

FEW, MANY_PARTS = 64, 16
"""The largest batch that is tried whole, and the largest number of its parts."""


def division(size: int, microbatches: int, replicas: int, flops: float) -> tuple[int, int, int]:
    """Return how many samples are tried, in how many micro-batches, and on how many replicas.

    If it is cheap, the whole batch is tried, divided as in the plan: the result of a layer that mixes samples depends
    on which samples share a part. Otherwise a few samples are tried, in parts of unequal size; their number is odd or
    even like the batch size.

    Args:
        size: the number of samples in the batch.
        microbatches, replicas: those of the plan.
        flops: the FLOPs of the forward of one sample.

    >>> division(8, 1, 2, 100.0), division(1000, 8, 1, 100.0), division(9, 1, 2, 1e9)
    ((8, 1, 2), (6, 2, 1), (2, 1, 2))
    """
    if size <= FEW and microbatches * replicas <= MANY_PARTS and 6 * flops * size <= CHEAP:
        return size, microbatches, replicas
    micro, replicas = min(microbatches, 2), min(replicas, 2)
    wanted = min(size, 2 * micro * replicas + (1 if size % 2 else 2))
    if 6 * flops * wanted > CHEAP:
        wanted = min(size, max(2, micro * replicas))
    return wanted, micro, replicas


def scatter_samples(samples: int, microbatches: int, replicas: int) -> Parts:
    """Return the samples of each part as `mpkit.strategies.job.feed` distributes them, without stand-ins.

    >>> scatter_samples(5, 2, 2)
    [[0, 2], [1], [3], [4]]
    """
    return [
        list(range(samples)[share(start, end, rank, replicas)])
        for start, end in split(samples, min(microbatches, samples))
        for rank in range(replicas)
        if start + rank < end
    ]
