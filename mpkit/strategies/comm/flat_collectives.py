"""All-gather and reduce-scatter without extra copies, on every backend.

nccl performs both directly on the given tensors, also in place. Gloo's all-gather fills a buffer of its own and copies
it; its reduce-scatter is an all-reduce of a copy, which sends twice as much as needed. So with gloo

    all-gather       each rank broadcasts its part directly into its place in the result
    reduce-scatter   each rank sends part j to rank j, which sums the parts that it receives and its own

Both send (n-1)/n of the tensor, as on a ring, and are one op in the trace. A reduce-scatter has memory for the parts
that are received, (n-1)/n of the tensor, until it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpkit.strategies.comm.arguments import tag_number

if TYPE_CHECKING:
    from mpkit.strategies.comm.communicator import Communicator


# torch 2.13 renamed both functions and warns when the old names are used.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


TAG = tag_number("Z999999") + 1  # of a reduce-scatter's messages; no program can use it
PIECE = 1 << 16  # elements to add up at a time, so that sums stay in a core's cache


class _All:
    """Several of torch's handles as one, with an optional last step once they are complete."""

    def __init__(self, handles: list[Any], last: Callable[[], object] | None = None) -> None:
        self._handles, self._last = handles, last

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        if self._last is not None:
            self._last()


def start_all_gather(group: Communicator, whole: Tensor, part: Tensor) -> Any:
    """Start filling `whole` (n k, ...) with every rank's `part` (k, ...), a view of it or not; return a handle."""
    if not group.wire.gloo:
        return _all_gather(whole, part, group.handle, async_op=True)
    places = whole.chunk(group.size)
    if places[group.index].data_ptr() != part.data_ptr():
        places[group.index].copy_(part)
    if group.size == 1 or not part.numel():
        return _All([])
    sources = zip(group.ranks, places, strict=True)
    return _All([dist.broadcast(place, src, group.handle, async_op=True) for src, place in sources])


def start_reduce_scatter(group: Communicator, part: Tensor, whole: Tensor) -> Any:
    """Start filling `part` (k, ...), which may be a view of `whole`, with this rank's part of the sum; return a handle.

    The sum is that of all ranks' `whole` (n k, ...).
    """
    if not group.wire.gloo:
        return _reduce_scatter(part, whole, group=group.handle, async_op=True)
    if group.size == 1 or not part.numel():
        if part.data_ptr() != whole.data_ptr():
            part.copy_(whole)
        return _All([])
    parts = whole.chunk(group.size)
    received = torch.empty(group.size - 1, *part.shape, dtype=whole.dtype, device=whole.device)
    others = [i for i in range(group.size) if i != group.index]
    places = zip(others, received, strict=True)
    handles = [dist.irecv(place, group.ranks[i], group.handle, TAG) for i, place in places]
    handles += [dist.isend(parts[i], group.ranks[i], group.handle, TAG) for i in others]
    in_order = [*received[: group.index], parts[group.index], *received[group.index :]]
    return _All(handles, lambda: _sum_into(part, in_order))


def _sum_into(part: Tensor, contributions: list[Tensor]) -> None:
    """Write the sum of contiguous tensors into `part`, which may be one of them; add up 16-bit ones in fp32."""
    precise = torch.float32 if part.dtype in (torch.bfloat16, torch.float16) else part.dtype
    pieces = [tensor.view(-1).split(PIECE) for tensor in (part, *contributions)]
    for place, first, *others in zip(*pieces, strict=True):
        total = first.to(precise, copy=True)
        for other in others:
            total += other
        place.copy_(total)
