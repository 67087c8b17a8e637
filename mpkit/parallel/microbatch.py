"""A batch, and the micro-batches that it is split into."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import accumulate

from torch import Tensor

__all__ = ["Value", "batch_size", "leaves", "map_tensors", "part", "share", "signature", "split"]

Value = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""Inputs or targets: a tensor, several by position, or several by name; the batch is their first dimension."""


def leaves(value: Value) -> list[Tensor]:
    """The tensors of a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    return list(value.values() if isinstance(value, dict) else value)


def map_tensors(fn: Callable[[Tensor], Tensor], value: Value) -> Value:
    """The same value with `fn` of each tensor in its place."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {name: fn(tensor) for name, tensor in value.items()}
    return tuple(fn(tensor) for tensor in value)


def batch_size(value: Value) -> int:
    """How many samples a value holds."""
    return int(leaves(value)[0].shape[0])


def split(size: int, m: int) -> list[tuple[int, int]]:
    """Where each of m micro-batches begins and ends; the first ones are one sample longer if it doesn't divide.

    >>> split(8, 3)
    [(0, 3), (3, 6), (6, 8)]
    """
    sizes = [size // m + (i < size % m) for i in range(m)]
    ends = list(accumulate(sizes))
    return [(end - n, end) for n, end in zip(sizes, ends, strict=True)]


def share(start: int, end: int, rank: int, n: int) -> slice:
    """Which of the samples `start` to `end` are the rank's: every n-th, as torch's DistributedSampler deals them.

    A rank that gets none takes the first one, which counts nothing: it has to be there for what all do together.

    >>> [list(range(10))[share(0, 10, rank, 4)] for rank in range(4)]
    [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    """
    return slice(start + rank, end, n) if start + rank < end else slice(start, start + 1)


def part(value: Value, which: slice) -> Value:
    """Some samples of a value; views, not copies."""
    return map_tensors(lambda tensor: tensor[which], value)


def signature(inputs: Value, targets: Value) -> Hashable:
    """What the shapes of everything computed on a micro-batch depend on.

    >>> import torch
    >>> signature(torch.zeros(2, 3), torch.zeros(2))
    ((None, (2, 3), torch.float32), (None, (2,), torch.float32))
    """
    found = []
    for value in (inputs, targets):
        names = list(value) if isinstance(value, dict) else [None] * len(leaves(value))
        for name, tensor in zip(names, leaves(value), strict=True):
            found.append((name, tuple(tensor.shape), tensor.dtype))
    return tuple(found)
