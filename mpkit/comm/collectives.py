"""Collectives in which every rank of a group both contributes and receives.

Those with a root are in `mpkit.comm.rooted`.

Payload is counted as in nccl-tests: the tensor for all-reduce, and the whole (gathered or not yet scattered) tensor
for the others.

Source of the names and their meaning: the MPI standard, chapter 6, and torch.distributed.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from mpkit.comm.direct import start_all_gather, start_reduce_scatter
from mpkit.comm.groups import Groups
from mpkit.comm.wire import Group, Work
from mpkit.trace import Kind

__all__ = ["Collectives"]

Out = Tensor | None
"""A tensor to fill and return; None: allocate a new one."""

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
"""The reductions passed to torch. "mean" is a sum that is divided afterwards, which every backend supports."""


class Collectives(Groups):
    """Collectives in which all ranks of a group play the same role.

    Every method uses all ranks where `group` is None. With `async_op=True` a method returns at once, with a `Work`
    whose `wait()` returns the result.
    """

    @overload
    def all_reduce(
        self, tensor: Tensor, group: Group | None = ..., async_op: Literal[False] = ..., *, op: str = ...
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self, tensor: Tensor, group: Group | None = ..., *, async_op: Literal[True], op: str = ...
    ) -> Work: ...
    def all_reduce(
        self, tensor: Tensor, group: Group | None = None, async_op: bool = False, *, op: str = "sum"
    ) -> Tensor | Work:
        """Replace each rank's tensor by the sum (or "mean", "max", "min") of all ranks' tensors, in place.

        Args:
            tensor: any shape, the same on every rank; overwritten, and returned.
            group: None: all ranks.
            async_op: return a `Work` at once.
            op: "sum", "mean", "max" or "min".
        """
        group = self._check(group, "all_reduce")
        if op not in REDUCTIONS and op != "mean":
            raise ValueError(f"all_reduce(op={op!r}): there are 'sum', 'mean', 'max' and 'min'")
        reduction = REDUCTIONS.get(op, dist.ReduceOp.SUM)
        wire = self._wire.outgoing(tensor)

        def result() -> Tensor:
            self._wire.arrived(wire, tensor)
            return tensor.div_(group.size) if op == "mean" else tensor

        work = self._collective(
            Kind.ALL_REDUCE, group, tensor, tensor.nbytes,
            lambda: dist.all_reduce(wire, reduction, group.handle, async_op=True), result,
            reduction=op, waits=not async_op,
        )  # fmt: skip
        return work if async_op else work.wait()

    @overload
    def all_gather(
        self, tensor: Tensor, group: Group | None = ..., async_op: Literal[False] = ..., *, out: Out = ...
    ) -> Tensor: ...
    @overload
    def all_gather(
        self, tensor: Tensor, group: Group | None = ..., *, async_op: Literal[True], out: Out = ...
    ) -> Work: ...
    def all_gather(
        self, tensor: Tensor, group: Group | None = None, async_op: bool = False, *, out: Out = None
    ) -> Tensor | Work:
        """Return all ranks' tensors, concatenated along the first dimension.

        Args:
            tensor: (k, ...), the same shape on every rank. Returns (n k, ...), n the size of the group.
            group: None: all ranks.
            async_op: return a `Work` at once.
            out: (n k, ...), filled and returned; None: a new tensor. `tensor` may be this rank's part of it.
        """
        group = self._check(group, "all_gather")
        wire = self._wire.outgoing(tensor if tensor.dim() else tensor[None])
        whole = self._into(out, (group.size * wire.shape[0], *wire.shape[1:]), wire, "all_gather")
        work = self._collective(
            Kind.ALL_GATHER, group, wire, group.size * tensor.nbytes,
            lambda: start_all_gather(whole, wire, group, self.rank, gloo=self._gloo),
            lambda: self._wire.arrived(whole, out), waits=not async_op,
        )  # fmt: skip
        return work if async_op else work.wait()

    @overload
    def reduce_scatter(
        self, tensor: Tensor, group: Group | None = ..., async_op: Literal[False] = ..., *, out: Out = ...
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self, tensor: Tensor, group: Group | None = ..., *, async_op: Literal[True], out: Out = ...
    ) -> Work: ...
    def reduce_scatter(
        self, tensor: Tensor, group: Group | None = None, async_op: bool = False, *, out: Out = None
    ) -> Tensor | Work:
        """Sum the tensors of all ranks and return this rank's n-th part of the first dimension.

        Args:
            tensor: (n k, ...), n the size of the group. Returns (k, ...).
            group: None: all ranks.
            async_op: return a `Work` at once.
            out: (k, ...), filled and returned; None: a new tensor. It may be this rank's part of `tensor`.
        """
        group = self._check(group, "reduce_scatter")
        part = self._part_shape(group, tensor, "reduce_scatter")
        wire = self._wire.outgoing(tensor)
        mine = self._into(out, part, wire, "reduce_scatter")
        work = self._collective(
            Kind.REDUCE_SCATTER, group, tensor, tensor.nbytes,
            lambda: start_reduce_scatter(mine, wire, group, gloo=self._gloo),
            lambda: self._wire.arrived(mine, out), waits=not async_op,
        )  # fmt: skip
        return work if async_op else work.wait()

    def all_to_all(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        """Exchange parts, so that part j of rank i's tensor becomes part i of rank j's: a transposition.

        Args:
            tensor: (n k, ...), n the size of the group. Returns (n k, ...).
            group: None: all ranks.
        """
        group = self._check(group, "all_to_all")
        self._part_shape(group, tensor, "all_to_all")
        wire = self._wire.outgoing(tensor)
        swapped = self._wire.incoming(wire.shape, wire)
        return self._collective(
            Kind.ALL_TO_ALL, group, tensor, tensor.nbytes,
            lambda: dist.all_to_all_single(swapped, wire, group=group.handle, async_op=True),
            lambda: self._wire.arrived(swapped),
        ).wait()  # fmt: skip

    def barrier(self, group: Group | None = None) -> None:
        """Wait until every rank of the group has reached this call."""
        group = self._check(group, "barrier")
        nothing = torch.empty(0)
        self._collective(
            Kind.BARRIER,
            group,
            nothing,
            0,
            lambda: dist.barrier(group.handle, async_op=True),
            lambda: nothing,
        ).wait()
