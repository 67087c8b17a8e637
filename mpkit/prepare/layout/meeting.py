"""A process group of threads: each thread stands for a rank, and their collectives exchange tensors in memory."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from mpkit.comm.process_group import Completed

__all__ = ["PATIENCE", "Meeting", "Seat"]


PATIENCE = 60.0
"""Seconds after which a thread stops waiting for the others, which have then taken another path."""


class Meeting:
    """The place where the threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.brought: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, index: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all threads, by place."""
        self.brought[index] = tensor.detach().clone()
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found


class Seat:
    """A `ProcessGroup` of threads as seen by one of them."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting, self.size, self.index = meeting, meeting.size, index

    def __deepcopy__(self, _: object) -> Seat:
        return self

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """Reduce the tensors of all threads, in place."""
        brought = torch.stack(self._meeting.exchange(self.index, tensor))
        if op in ("max", "min"):
            return tensor.copy_(brought.amax(0) if op == "max" else brought.amin(0))
        return tensor.copy_(brought.sum(0) / (self.size if op == "mean" else 1))

    def start_all_reduce(self, tensor: Tensor) -> Completed:
        """Return the completed all-reduce."""
        return Completed(self.all_reduce(tensor))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the concatenated tensors of all threads."""
        return torch.cat(self._meeting.exchange(self.index, tensor))

    def start_all_gather(self, tensor: Tensor) -> Completed:
        """Return the completed all-gather."""
        return Completed(self.all_gather(tensor))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return this thread's part of the sum."""
        total = torch.stack(self._meeting.exchange(self.index, tensor)).sum(0)
        return total.chunk(self.size)[self.index].clone()

    def start_reduce_scatter(self, tensor: Tensor) -> Completed:
        """Return the completed reduce-scatter."""
        return Completed(self.reduce_scatter(tensor))

    def isend(self, tensor: Tensor, to: int, tag: int | str = 0) -> Completed:
        """Refuse: tensor parallelism sends nothing point to point."""
        raise NotImplementedError("tensor parallelism sends nothing to one rank")

    def irecv(self, buffer: Tensor, source: int, tag: int | str = 0) -> Completed:
        """Refuse: tensor parallelism receives nothing point to point."""
        raise NotImplementedError("tensor parallelism sends nothing to one rank")
