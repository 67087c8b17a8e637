"""OneRank: the communicator along an axis of one rank, which sends nothing and records nothing.

Strategies are written for n ranks and hold for n = 1: the sum over one rank is its tensor, and so is what one rank
gathers. Nothing is copied.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.process_group import CompletedWork
from mpkit.strategies.comm.wire import Wire

__all__ = ["OneRank"]


class OneRank(Communicator):
    """A rank by itself: each collective is complete when it is called, and returns the tensor that it was given.

    Args:
        wire: this rank's end of all communication.
    """

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire, (wire.rank,))

    def all_reduce(
        self, tensor: Tensor, group: Communicator | None = None, async_op: bool = False, *, op: str = "sum"
    ) -> Any:
        """Return the tensor."""
        return CompletedWork(tensor) if async_op else tensor

    def all_gather(
        self,
        tensor: Tensor,
        group: Communicator | None = None,
        async_op: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """Return the tensor, or `out` with a copy of it."""
        whole = _copy_into(out, tensor)
        return CompletedWork(whole) if async_op else whole

    def reduce_scatter(
        self,
        tensor: Tensor,
        group: Communicator | None = None,
        async_op: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """Return the tensor, or `out` with a copy of it."""
        part = _copy_into(out, tensor)
        return CompletedWork(part) if async_op else part

    def broadcast(self, tensor: Tensor, src: int = 0, group: Communicator | None = None) -> Tensor:
        """Return the tensor."""
        return tensor

    def gather(self, tensor: Tensor, dst: int = 0, group: Communicator | None = None) -> Tensor:
        """Return the tensor."""
        return tensor


def _copy_into(out: Tensor | None, tensor: Tensor) -> Tensor:
    if out is None:
        return tensor
    if out.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
        out.copy_(tensor)
    return out
