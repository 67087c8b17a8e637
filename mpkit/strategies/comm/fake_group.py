"""Communicators without peers, for an axis with one rank and for a dry run.

Strategies are written for n ranks and hold for n = 1: the sum over one rank is its tensor, and so is the gathered one.
In a dry run, whatever other ranks would send has the right shape but comes from this rank's own tensor: an all-reduce
returns the tensor itself, an all-gather n copies of it, a reduce-scatter this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.wire import CompletedWork, Wire


class FakeGroup(Communicator):
    """A group of `size` ranks, of which only the one at `index` exists; nothing is sent or recorded.

    >>> group = FakeGroup(4)
    >>> group.all_gather(torch.ones(2, 3)).shape, group.reduce_scatter(torch.ones(8, 3)).shape
    (torch.Size([8, 3]), torch.Size([2, 3]))

    Attributes:
        reduced, gathered: bytes of the results of all all-reduces and all-gathers so far.
    """

    def __init__(self, size: int, index: int = 0) -> None:
        self.size, self.index = size, index
        self.reduced = self.gathered = 0

    def __deepcopy__(self, _: object) -> FakeGroup:
        return self  # a copy of a model communicates with the same ranks

    def all_reduce(self, tensor: Tensor, *, async_op: bool = False, op: str = "sum") -> Any:
        """Return the tensor."""
        self.reduced += tensor.nbytes
        return CompletedWork(tensor) if async_op else tensor

    def all_gather(self, tensor: Tensor, *, async_op: bool = False, out: Tensor | None = None) -> Any:
        """Return n copies of the tensor."""
        self.gathered += self.size * tensor.nbytes
        return _complete(tensor if self.size == 1 else torch.cat([tensor] * self.size), out, async_op)

    def reduce_scatter(self, tensor: Tensor, *, async_op: bool = False, out: Tensor | None = None) -> Any:
        """Return this rank's part of the tensor."""
        mine = tensor if self.size == 1 else tensor.chunk(self.size)[self.index].clone()
        return _complete(mine, out, async_op)

    def all_to_all(
        self, tensor: Tensor, *, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> Tensor:
        """Return the tensor, or as many of its rows as would be received, over and over."""
        if receives is None or sum(receives) == len(tensor):
            return tensor
        rows = tensor if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:])
        return rows[torch.arange(sum(receives), device=tensor.device) % len(rows)]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return the tensor."""
        return tensor

    def gather(self, tensor: Tensor, dst: int = 0) -> Tensor:
        """Return the tensor."""
        return tensor

    def isend(self, tensor: Tensor, dst: int, tag: int | str = 0) -> Any:
        """Send nothing."""
        return CompletedWork(tensor)

    def irecv(self, buffer: Tensor, src: int, tag: int | str = 0) -> Any:
        """Return the buffer unchanged."""
        return CompletedWork(buffer)


class OneRank(FakeGroup):
    """An axis of one rank: each collective returns its tensor."""

    def __init__(self, wire: Wire) -> None:
        Communicator.__init__(self, wire, (wire.rank,))
        self.reduced = self.gathered = 0


def _complete(result: Tensor, out: Tensor | None, async_op: bool) -> Any:
    if out is not None:
        if out.untyped_storage()._cdata != result.untyped_storage()._cdata:
            out.copy_(result)
        result = out
    return CompletedWork(result) if async_op else result
