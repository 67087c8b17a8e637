"""Collectives with a root: one rank sends to all ranks of a group, or receives from all.

    broadcast    root to all: the same tensor        reduce    all to root: the sum
    scatter      root to all: one part per rank      gather    all to root: the parts

Payload is counted as in nccl-tests: the tensor for broadcast and reduce, and the whole (gathered or not yet scattered)
tensor for the others.

These functions are methods of `Communicator`. Source of the names and their meaning: the MPI standard, chapter 6, and
torch.distributed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from mpkit.strategies.comm.arguments import member, part_shape, root
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.comm.communicator import Communicator

__all__ = ["broadcast", "gather", "reduce", "scatter"]


def broadcast(self: Communicator, tensor: Tensor, src: int = 0, group: Communicator | None = None) -> Tensor:
    """Copy rank `src`'s tensor into every rank's tensor, in place.

    Args:
        tensor: any shape, the same on every rank; overwritten, and returned.
        src: the root.
        group: some of this communicator's ranks; None: all of them.
    """
    group, wire = member(group or self, "broadcast"), self.wire
    source = root(self, group, src, "broadcast")
    sent = wire.prepare_send(tensor)
    return wire.issue(
        group.next_collective(Kind.BROADCAST, tensor, source),
        tensor.nbytes,
        partial(dist.broadcast, sent, source, group.handle, async_op=True),
        partial(wire.finish_receive, sent, tensor),
        waits=True,
    ).wait()


def reduce(
    self: Communicator,
    tensor: Tensor,
    dst: int = 0,
    group: Communicator | None = None,
    *,
    in_place: bool = False,
) -> Tensor:
    """Return the sum of all ranks' tensors on rank `dst`, and a rank's own tensor on the others.

    Args:
        tensor: any shape, the same on every rank.
        dst: the root.
        group: some of this communicator's ranks; None: all of them.
        in_place: write the sum into `dst`'s tensor; the contents of the other ranks' tensors are then undefined.
    """
    group, wire = member(group or self, "reduce"), self.wire
    target = root(self, group, dst, "reduce")
    sent = wire.prepare_send(tensor)
    if not in_place:
        sent = sent.clone()  # gloo leaves partial sums in every rank's tensor
    at_root = partial(wire.finish_receive, sent, tensor if in_place else None)
    return wire.issue(
        group.next_collective(Kind.REDUCE, tensor, target),
        tensor.nbytes,
        partial(dist.reduce, sent, target, group=group.handle, async_op=True),
        at_root if self.rank == target else lambda: tensor,
        waits=True,
    ).wait()


def gather(self: Communicator, tensor: Tensor, dst: int = 0, group: Communicator | None = None) -> Tensor:
    """Return all ranks' tensors on rank `dst`, concatenated along the first dimension.

    Args:
        tensor: (k, ...). Returns (n k, ...) on `dst`, an empty tensor on the others.
        dst: the root.
        group: some of this communicator's ranks; None: all of them.
    """
    group, wire = member(group or self, "gather"), self.wire
    target = root(self, group, dst, "gather")
    sent = wire.prepare_send(tensor if tensor.dim() else tensor[None])
    rows = group.size * sent.shape[0] if self.rank == target else 0
    whole = wire.make_buffer((rows, *sent.shape[1:]), sent)
    parts = list(whole.chunk(group.size)) if self.rank == target else None
    return wire.issue(
        group.next_collective(Kind.GATHER, sent, target),
        group.size * tensor.nbytes,
        partial(dist.gather, sent, parts, target, group.handle, async_op=True),
        partial(wire.finish_receive, whole),
        waits=True,
    ).wait()


def scatter(self: Communicator, tensor: Tensor, src: int = 0, group: Communicator | None = None) -> Tensor:
    """Scatter rank `src`'s tensor: each rank receives its own n-th part of the first dimension.

    Args:
        tensor: (n k, ...), of the same shape on every rank. Only `src`'s values matter: the others may pass a
            tensor without memory, `torch.empty(1).expand(n * k)`. Returns (k, ...).
        src: the root.
        group: some of this communicator's ranks; None: all of them.
    """
    group, wire = member(group or self, "scatter"), self.wire
    source = root(self, group, src, "scatter")
    part = part_shape(group, tensor, "scatter")
    sent = wire.prepare_send(tensor) if self.rank == source else tensor
    mine = wire.make_buffer(part, sent)
    parts = list(sent.chunk(group.size)) if self.rank == source else None
    return wire.issue(
        group.next_collective(Kind.SCATTER, tensor, source),
        tensor.nbytes,
        partial(dist.scatter, mine, parts, source, group.handle, async_op=True),
        partial(wire.finish_receive, mine),
        waits=True,
    ).wait()
