"""Collectives in which every rank of a group both contributes and receives.

Those with a root are in `mpkit.strategies.comm.collectives`. With `async_op=True` a collective returns at
once, with a `Work` whose `wait()` returns the result.

Payload is counted as in nccl-tests: the tensor for all-reduce, and the whole (gathered or not yet scattered) tensor
for the others; of an all-to-all of uneven parts what this rank sends.

These functions are methods of `Communicator`. Source of the names and their meaning: the MPI standard, chapter 6, and
torch.distributed.

Collectives with a root: one rank sends to all ranks of a group, or receives from all.

    broadcast    root to all: the same tensor        reduce    all to root: the sum
    scatter      root to all: one part per rank      gather    all to root: the parts

Payload is counted as in nccl-tests: the tensor for broadcast and reduce, and the whole (gathered or not yet scattered)
tensor for the others.

These functions are methods of `Communicator`. Source of the names and their meaning: the MPI standard, chapter 6, and
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from mpkit.strategies.comm.arguments import member, output_tensor, part_shape, reducible, root, uneven_parts
from mpkit.strategies.comm.flat_collectives import start_all_gather, start_reduce_scatter
from mpkit.strategies.comm.wire import Work
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.comm.communicator import Communicator

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


Out = Tensor | None
"""A tensor to fill and return; None: allocate a new one."""

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided afterwards, which every backend supports
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
"""What torch is asked for."""


@overload
def all_reduce(
    self: Communicator, tensor: Tensor, group: Communicator | None = ..., async_op: Literal[False] = ...,
    *, op: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def all_reduce(
    self: Communicator, tensor: Tensor, group: Communicator | None = ...,
    *, async_op: Literal[True], op: str = ...,
) -> Work: ...  # fmt: skip
def all_reduce(
    self: Communicator, tensor: Tensor, group: Communicator | None = None, async_op: bool = False,
    *, op: str = "sum",
) -> Tensor | Work:  # fmt: skip
    """Replace each rank's tensor by the sum (or "mean", "max", "min") of all ranks' tensors, in place.

    Args:
        tensor: any shape, the same on every rank; overwritten, and returned.
        group: some of this communicator's ranks; None: all of them.
        async_op: return a `Work` at once.
        op: "sum", "mean", "max" or "min".
    """
    # ---- check
    group, wire = member(group or self, "all_reduce"), self.wire
    if op not in REDUCTIONS:
        raise ValueError(f"all_reduce(op={op!r}): there are 'sum', 'mean', 'max' and 'min'")
    reducible(tensor, op)
    # ---- outgoing
    sent = wire.prepare_send(tensor)
    # ---- record, publish, start
    result = partial(wire.finish_receive, sent, tensor)
    work = wire.issue(
        group.next_collective(Kind.ALL_REDUCE, tensor, reduction=op),
        tensor.nbytes,
        partial(dist.all_reduce, sent, REDUCTIONS[op], group.handle, async_op=True),
        partial(_divide_result, result, group.size) if op == "mean" else result,
        waits=not async_op,
    )
    # ---- wait
    return work if async_op else work.wait()


def _divide_result(result: Callable[[], Tensor], n: int) -> Tensor:
    return result().div_(n)


@overload
def all_gather(
    self: Communicator, tensor: Tensor, group: Communicator | None = ..., async_op: Literal[False] = ...,
    *, out: Out = ...,
) -> Tensor: ...  # fmt: skip
@overload
def all_gather(
    self: Communicator, tensor: Tensor, group: Communicator | None = ...,
    *, async_op: Literal[True], out: Out = ...,
) -> Work: ...  # fmt: skip
def all_gather(
    self: Communicator, tensor: Tensor, group: Communicator | None = None, async_op: bool = False,
    *, out: Out = None,
) -> Tensor | Work:  # fmt: skip
    """Return all ranks' tensors, concatenated along the first dimension.

    Args:
        tensor: (k, ...), the same shape on every rank. Returns (n k, ...), n the size of the group.
        group: some of this communicator's ranks; None: all of them.
        async_op: return a `Work` at once.
        out: (n k, ...), filled and returned; None: a new tensor. `tensor` may be this rank's part of it.
    """
    group, wire = member(group or self, "all_gather"), self.wire
    sent = wire.prepare_send(tensor if tensor.dim() else tensor[None])
    whole = output_tensor(self, out, (group.size * sent.shape[0], *sent.shape[1:]), sent, "all_gather")
    work = wire.issue(
        group.next_collective(Kind.ALL_GATHER, sent),
        group.size * tensor.nbytes,
        partial(start_all_gather, group, whole, sent),
        partial(wire.finish_receive, whole, out),
        waits=not async_op,
    )
    return work if async_op else work.wait()


@overload
def reduce_scatter(
    self: Communicator, tensor: Tensor, group: Communicator | None = ..., async_op: Literal[False] = ...,
    *, out: Out = ...,
) -> Tensor: ...  # fmt: skip
@overload
def reduce_scatter(
    self: Communicator, tensor: Tensor, group: Communicator | None = ...,
    *, async_op: Literal[True], out: Out = ...,
) -> Work: ...  # fmt: skip
def reduce_scatter(
    self: Communicator, tensor: Tensor, group: Communicator | None = None, async_op: bool = False,
    *, out: Out = None,
) -> Tensor | Work:  # fmt: skip
    """Sum the tensors of all ranks and return this rank's n-th part of the first dimension.

    Args:
        tensor: (n k, ...), n the size of the group. Returns (k, ...).
        group: some of this communicator's ranks; None: all of them.
        async_op: return a `Work` at once.
        out: (k, ...), filled and returned; None: a new tensor. It may be this rank's part of `tensor`.
    """
    group, wire = member(group or self, "reduce_scatter"), self.wire
    part = part_shape(group, tensor, "reduce_scatter")
    sent = wire.prepare_send(tensor)
    mine = output_tensor(self, out, part, sent, "reduce_scatter")
    work = wire.issue(
        group.next_collective(Kind.REDUCE_SCATTER, tensor),
        tensor.nbytes,
        partial(start_reduce_scatter, group, mine, sent),
        partial(wire.finish_receive, mine, out),
        waits=not async_op,
    )
    return work if async_op else work.wait()


@overload
def all_to_all(
    self: Communicator, tensor: Tensor, group: Communicator | None = ..., async_op: Literal[False] = ...,
    *, sends: Sequence[int] | None = ..., receives: Sequence[int] | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def all_to_all(
    self: Communicator, tensor: Tensor, group: Communicator | None = ...,
    *, async_op: Literal[True], sends: Sequence[int] | None = ..., receives: Sequence[int] | None = ...,
) -> Work: ...  # fmt: skip
def all_to_all(
    self: Communicator, tensor: Tensor, group: Communicator | None = None, async_op: bool = False,
    *, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None,
) -> Tensor | Work:  # fmt: skip
    """Exchange parts, so that part j of rank i's tensor becomes part i of rank j's: a transposition.

    Parts are equal, or rows of the numbers in `sends`; then `receives` has what the other ranks send to this one, which
    they have to agree on before, by an all_to_all of the numbers.

    Args:
        tensor: (n k, ...), n the size of the group. Returns (n k, ...). With uneven parts (sum of `sends`, ...);
            returns (sum of `receives`, ...).
        group: some of this communicator's ranks; None: all of them.
        async_op: return a `Work` at once.
        sends: by member, the rows for it; None: equally many for each.
        receives: by member, the rows that it sends to this rank; None where `sends` is None.

    Raises:
        ValueError: the tensor cannot be cut in this way.
    """
    group, wire = member(group or self, "all_to_all"), self.wire
    parts = uneven_parts(group, tensor, sends, receives)
    if parts is None:
        part_shape(group, tensor, "all_to_all")
    sent = wire.prepare_send(tensor)
    swapped = wire.make_buffer(sent.shape if parts is None else (sum(parts[1]), *sent.shape[1:]), sent)
    work = wire.issue(
        group.next_collective(Kind.ALL_TO_ALL, tensor, parts=parts),
        tensor.nbytes,
        partial(_start_all_to_all, group, swapped, sent, parts),
        partial(wire.finish_receive, swapped),
        waits=not async_op,
        rows=() if parts is None else parts[0],
    )
    return work if async_op else work.wait()


def _start_all_to_all(
    group: Communicator, swapped: Tensor, sent: Tensor, parts: tuple[list[int], list[int]] | None
) -> Any:
    sends, receives = parts or (None, None)
    return dist.all_to_all_single(swapped, sent, receives, sends, group.handle, async_op=True)


def barrier(self: Communicator, group: Communicator | None = None) -> None:
    """Wait until every rank of the group has reached this call."""
    group = member(group or self, "barrier")
    nothing = torch.empty(0)
    self.wire.issue(
        group.next_collective(Kind.BARRIER, nothing),
        0,
        partial(dist.barrier, group.handle, async_op=True),
        lambda: nothing,
        waits=True,
    ).wait()


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
