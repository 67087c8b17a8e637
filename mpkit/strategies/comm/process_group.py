"""The interface that a strategy needs of a process group, and a group without ranks for dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor

__all__ = ["CompletedWork", "FakeGroup", "PendingWork", "ProcessGroup"]


class PendingWork(Protocol):
    """A communication in progress, such as a `Work`."""

    def wait(self) -> Tensor:
        """Wait until the communication is complete and return its result."""


class CompletedWork(NamedTuple):
    """A communication without a partner: it is complete at once."""

    result: Tensor

    def wait(self) -> Tensor:
        """Return the result."""
        return self.result


class ProcessGroup(Protocol):
    """What a strategy needs of its axis: the number of ranks along it, and communication among them.

    With `async_op=True` a collective returns at once; `wait()` of what it returns returns the result.

    Attributes:
        size: the number of ranks, n.
        index: this rank's place among them, 0 to n - 1.
    """

    size: int
    index: int

    @overload
    def all_reduce(self, tensor: Tensor, *, async_op: Literal[False] = ..., op: str = ...) -> Tensor: ...
    @overload
    def all_reduce(self, tensor: Tensor, *, async_op: Literal[True], op: str = ...) -> PendingWork: ...
    def all_reduce(self, tensor: Tensor, *, async_op: bool = False, op: str = "sum") -> Tensor | PendingWork:
        """Reduce over the group with a sum (or "max", "min", "mean"), in place."""

    @overload
    def all_gather(self, tensor: Tensor, *, async_op: Literal[False] = ...) -> Tensor: ...
    @overload
    def all_gather(self, tensor: Tensor, *, async_op: Literal[True]) -> PendingWork: ...
    def all_gather(self, tensor: Tensor, *, async_op: bool = False) -> Tensor | PendingWork:
        """Gather (k, ...) from every rank into (n k, ...), in the order of their places."""

    @overload
    def reduce_scatter(self, tensor: Tensor, *, async_op: Literal[False] = ...) -> Tensor: ...
    @overload
    def reduce_scatter(self, tensor: Tensor, *, async_op: Literal[True]) -> PendingWork: ...
    def reduce_scatter(self, tensor: Tensor, *, async_op: bool = False) -> Tensor | PendingWork:
        """Sum the ranks' (n k, ...) and return this rank's part (k, ...)."""

    def all_to_all(
        self, tensor: Tensor, *, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> Tensor:
        """Exchange parts: part j of rank i's (n k, ...) becomes part i of rank j's; parts of `sends` rows, if given."""

    def isend(self, tensor: Tensor, dst: int, tag: int | str = 0) -> PendingWork:
        """Start sending to the rank at place `dst`."""

    def irecv(self, buffer: Tensor, src: int, tag: int | str = 0) -> PendingWork:
        """Start receiving from the rank at place `src` into a contiguous buffer."""


class FakeGroup:
    """A `ProcessGroup` without ranks, for a dry run.

    Whatever would be received from other ranks has the right shape but comes from this rank's own tensor: an
    all-reduce returns the tensor itself, an all-gather n copies of it, a reduce-scatter this rank's part of it.

    >>> line = FakeGroup(4)
    >>> line.all_gather(torch.ones(2, 3)).shape, line.reduce_scatter(torch.ones(8, 3)).shape
    (torch.Size([8, 3]), torch.Size([2, 3]))

    Attributes:
        size, index: as in `Communicator`.
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

    def all_gather(self, tensor: Tensor, *, async_op: bool = False) -> Any:
        """Return n copies of the tensor."""
        self.gathered += self.size * tensor.nbytes
        gathered = torch.cat([tensor] * self.size)
        return CompletedWork(gathered) if async_op else gathered

    def reduce_scatter(self, tensor: Tensor, *, async_op: bool = False) -> Any:
        """Return this rank's part of the tensor."""
        part = tensor.chunk(self.size)[self.index].clone()
        return CompletedWork(part) if async_op else part

    def all_to_all(
        self, tensor: Tensor, *, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> Tensor:
        """Return the tensor, or as many of its rows as would be received, over and over."""
        if receives is None or sum(receives) == len(tensor):
            return tensor
        rows = tensor if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:])
        return rows[torch.arange(sum(receives), device=tensor.device) % len(rows)]

    def isend(self, tensor: Tensor, dst: int, tag: int | str = 0) -> CompletedWork:
        """Send nothing."""
        return CompletedWork(tensor)

    def irecv(self, buffer: Tensor, src: int, tag: int | str = 0) -> CompletedWork:
        """Return the buffer unchanged."""
        return CompletedWork(buffer)
