"""The interface that a strategy needs of a process group, and a group without ranks for dry runs."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Completed", "FakeGroup", "Pending", "ProcessGroup"]


class Pending(Protocol):
    """A communication in progress, such as a `Work`."""

    def wait(self) -> Tensor:
        """Wait until the communication is complete and return its result."""


class ProcessGroup(Protocol):
    """What a strategy needs of its axis: the number of ranks along it, and communication among them.

    Attributes:
        size: the number of ranks, n.
        index: this rank's place among them, 0 to n - 1.
    """

    size: int
    index: int

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """Reduce over the group with a sum (or "max", "min", "mean"), in place."""

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Start an all-reduce with a sum and return at once."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather (k, ...) from every rank into (n k, ...), in the order of their places."""

    def start_all_gather(self, tensor: Tensor) -> Pending:
        """Start an all-gather and return at once."""

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sum the ranks' (n k, ...) and return this rank's part (k, ...)."""

    def start_reduce_scatter(self, tensor: Tensor) -> Pending:
        """Start a reduce-scatter and return at once."""

    def isend(self, tensor: Tensor, to: int, tag: int | str = 0) -> Pending:
        """Start sending to the rank at place `to`."""

    def irecv(self, buffer: Tensor, source: int, tag: int | str = 0) -> Pending:
        """Start receiving from the rank at place `source` into a contiguous buffer."""


class FakeGroup:
    """A `ProcessGroup` without ranks, for a dry run.

    Whatever would be received from other ranks has the right shape but comes from this rank's own tensor.

    >>> line = FakeGroup(4)
    >>> line.all_gather(torch.ones(2, 3)).shape, line.reduce_scatter(torch.ones(8, 3)).shape
    (torch.Size([8, 3]), torch.Size([2, 3]))

    Attributes:
        size, index: as in `AxisGroup`.
        reduced, gathered: bytes of the results of all all-reduces and all-gathers so far.
    """

    def __init__(self, size: int, index: int = 0) -> None:
        self.size, self.index = size, index
        self.reduced = self.gathered = 0

    def __deepcopy__(self, _: object) -> FakeGroup:
        return self  # a copy of a model communicates with the same ranks

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """Return the tensor itself."""
        self.reduced += tensor.nbytes
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Completed:
        """Return the completed all-reduce."""
        return Completed(self.all_reduce(tensor))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return (n k, ...): n copies of the tensor (k, ...)."""
        self.gathered += self.size * tensor.nbytes
        return torch.cat([tensor] * self.size)

    def start_all_gather(self, tensor: Tensor) -> Completed:
        """Return the completed all-gather."""
        return Completed(self.all_gather(tensor))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return this rank's part (k, ...) of the tensor (n k, ...)."""
        return tensor.chunk(self.size)[self.index].clone()

    def start_reduce_scatter(self, tensor: Tensor) -> Completed:
        """Return the completed reduce-scatter."""
        return Completed(self.reduce_scatter(tensor))

    def isend(self, tensor: Tensor, to: int, tag: int | str = 0) -> Completed:
        """Send nothing."""
        return Completed(tensor)

    def irecv(self, buffer: Tensor, source: int, tag: int | str = 0) -> Completed:
        """Return the buffer unchanged."""
        return Completed(buffer)


class Completed(NamedTuple):
    """A communication without a partner: it is complete at once."""

    result: Tensor

    def wait(self) -> Tensor:
        """Return the result."""
        return self.result
