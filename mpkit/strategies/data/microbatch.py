"""Batches, and the micro-batches that they are split into."""

from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate

from torch import Tensor

Value = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""Inputs or targets: one tensor, several by position, or several by name; the first dimension is the batch."""


def leaves(value: Value) -> list[Tensor]:
    """Return the tensors of a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return list(value.values() if isinstance(value, dict) else value)


def map_tensors(fn: Callable[[Tensor], Tensor], value: Value) -> Value:
    """Return the value with `fn` applied to each of its tensors."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {name: fn(tensor) for name, tensor in value.items()}
    return tuple(fn(tensor) for tensor in value)


def batch_size(value: Value) -> int:
    """Return the number of samples in a value."""
    return int(leaves(value)[0].shape[0])


def split(size: int, m: int) -> list[tuple[int, int]]:
    """Return the start and end of each of m micro-batches; if m does not divide `size`, the first have one more sample.

    >>> split(8, 3)
    [(0, 3), (3, 6), (6, 8)]
    """
    sizes = [size // m + (i < size % m) for i in range(m)]
    ends = list(accumulate(sizes))
    return [(end - n, end) for n, end in zip(sizes, ends, strict=True)]


def share(start: int, end: int, rank: int, n: int) -> slice:
    """Return the rank's share of the samples `start` to `end`: every n-th, as in torch's DistributedSampler.

    A rank without samples takes the first one with weight zero, since it takes part in the collectives.

    >>> [list(range(10))[share(0, 10, rank, 4)] for rank in range(4)]
    [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    """
    return slice(start + rank, end, n) if start + rank < end else slice(start, start + 1)


def shares(size: int, m: int, n: int) -> list[list[slice]]:
    """Return the samples that each of n replicas takes, for each of a batch's m micro-batches.

    >>> shares(8, 2, 2)
    [[slice(0, 4, 2), slice(1, 4, 2)], [slice(4, 8, 2), slice(5, 8, 2)]]
    """
    return [[share(start, end, rank, n) for rank in range(n)] for start, end in split(size, m)]


def part(value: Value, which: slice) -> Value:
    """Return some samples of a value, as views."""
    return map_tensors(lambda tensor: tensor[which], value)


def signature(inputs: Value, targets: Value) -> Hashable:
    """Return a key on which the shapes of everything computed on a micro-batch depend.

    >>> import torch
    >>> signature(torch.zeros(2, 3), torch.zeros(2))
    ((None, (2, 3), torch.float32), (None, (2,), torch.float32))
    """
    described = []
    for value in (inputs, targets):
        names = list(value) if isinstance(value, dict) else [None] * len(leaves(value))
        for name, tensor in zip(names, leaves(value), strict=True):
            described.append((name, tuple(tensor.shape), tensor.dtype))
    return tuple(described)


def one_of_each_shape(
    batches: Iterable[tuple[Value, Value]], m: int, n: int
) -> dict[Hashable, tuple[Value, Value]]:
    """Return a replica's share of a micro-batch of every shape that occurs, by its signature.

    There are n replicas, and m micro-batches per batch, or one per sample of a smaller batch.
    """
    by_signature: dict[Hashable, tuple[Value, Value]] = {}
    for inputs, targets in batches:
        size = batch_size(inputs)
        for which in (each for replicas in shares(size, min(m, size), n) for each in replicas):
            x, y = part(inputs, which), part(targets, which)
            by_signature.setdefault(signature(x, y), (x, y))
    return by_signature
