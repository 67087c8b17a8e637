"""A process group of threads: each thread stands for a rank, and their collectives exchange tensors in memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from mpkit.strategies.comm.process_group import AtOnce, CompletedWork

__all__ = ["PATIENCE", "TensorExchange", "ThreadGroup"]


PATIENCE = 60.0
"""Seconds after which a thread stops waiting for the others, which have then taken another path."""


class TensorExchange:
    """The place where the threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)
        self.brought: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, index: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all threads, by place."""
        self.brought[index] = tensor.detach().clone()
        self.barrier.wait()
        tensors = list(self.brought)
        self.barrier.wait()
        return tensors


class ThreadGroup(AtOnce):
    """A `ProcessGroup` of threads as seen by one of them."""

    def __init__(self, exchange: TensorExchange, index: int) -> None:
        self._exchange, self.size, self.index = exchange, exchange.size, index

    def __deepcopy__(self, _: object) -> ThreadGroup:
        return self

    def _all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        brought = torch.stack(self._exchange.exchange(self.index, tensor))
        if op in ("max", "min"):
            return tensor.copy_(brought.amax(0) if op == "max" else brought.amin(0))
        return tensor.copy_(brought.sum(0) / (self.size if op == "mean" else 1))

    def _all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._exchange.exchange(self.index, tensor))

    def _reduce_scatter(self, tensor: Tensor) -> Tensor:
        total = torch.stack(self._exchange.exchange(self.index, tensor)).sum(0)
        return total.chunk(self.size)[self.index].clone()

    def all_to_all(
        self, tensor: Tensor, *, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> Tensor:
        """Return the parts of all threads' tensors that are for this one."""
        if sends is not None or receives is not None:
            raise NotImplementedError("tensor and context parallelism exchange equal parts")
        brought = self._exchange.exchange(self.index, tensor)
        return torch.cat([each.chunk(self.size)[self.index] for each in brought])

    def isend(self, tensor: Tensor, dst: int, tag: int | str = 0) -> CompletedWork:
        """Refuse: tensor parallelism sends nothing point to point."""
        raise NotImplementedError("tensor parallelism sends nothing to one rank")

    def irecv(self, buffer: Tensor, src: int, tag: int | str = 0) -> CompletedWork:
        """Refuse: tensor parallelism receives nothing point to point."""
        raise NotImplementedError("tensor parallelism sends nothing to one rank")
