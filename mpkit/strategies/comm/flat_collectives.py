"""All-gather and reduce-scatter without extra copies, on every backend.

nccl performs both directly on the given tensors, also in place. Gloo's all-gather fills a buffer of its own and copies
it; its reduce-scatter is an all-reduce of a copy, which sends twice as much as needed. So with gloo

    all-gather       each rank broadcasts its part directly into its place in the result
    reduce-scatter   each rank sends part j to rank j, which sums the parts it receives

Both send (n-1)/n of the tensor, as on a ring, and are one op in the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from mpkit.strategies.comm.communicator import Communicator

__all__ = ["start_all_gather", "start_reduce_scatter"]

# torch 2.13 renamed both functions and warns when the old names are used.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _All:
    """Several of torch's handles as one, with an optional last step once they are complete."""

    def __init__(self, handles: list[Any], last: Callable[[], object] | None = None) -> None:
        self._handles = handles
        self._last = last

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        if self._last is not None:
            self._last()


def start_all_gather(group: Communicator, whole: Tensor, part: Tensor) -> Any:
    """Start filling `whole` (n k, ...) with every rank's `part` (k, ...), which may be a view of `whole`.

    Returns:
        A handle to wait for.
    """
    if not group.wire.gloo:
        return _all_gather(whole, part, group.handle, async_op=True)
    places = whole.chunk(group.size)
    if places[group.index].data_ptr() != part.data_ptr():
        places[group.index].copy_(part)
    return _All(
        [
            dist.broadcast(place, src, group.handle, async_op=True)
            for src, place in zip(group.ranks, places, strict=True)
        ]
        if group.size > 1 and part.numel()
        else []
    )


def start_reduce_scatter(group: Communicator, part: Tensor, whole: Tensor) -> Any:
    """Start filling `part` (k, ...) with this rank's part of the sum of all ranks' `whole` (n k, ...).

    `part` may be a view of `whole`.

    Returns:
        A handle to wait for.
    """
    if not group.wire.gloo:
        return _reduce_scatter(part, whole, group=group.handle, async_op=True)
    if group.size == 1 or not part.numel():
        if part.data_ptr() != whole.data_ptr():
            part.copy_(whole)
        return _All([])
    given = torch.empty_like(whole)  # this rank's part, as contributed by each rank
    handle = dist.all_to_all_single(given, whole, group=group.handle, async_op=True)
    return _All(
        [handle], lambda: torch.sum(given.view(group.size, *part.shape), 0, dtype=part.dtype, out=part)
    )
