"""Collectives: what a group of ranks does together.

Payload is counted as nccl-tests does: the tensor for all-reduce, broadcast and reduce, the whole (gathered or not
yet scattered) tensor for the others.

Source of the names and of what each does: the MPI standard, chapter 6, and torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from mpkit.parallel.direct import start_all_gather, start_reduce_scatter
from mpkit.parallel.wire import Group, Wire, Work
from mpkit.record.recorder import Recorder
from mpkit.trace import Kind

__all__ = ["Collectives"]

Out = Tensor | None
"""A tensor to be filled and returned; None: a new one."""

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
"""What torch is asked for; "mean" is the sum, divided afterwards, which every backend can."""


class Collectives:
    """What a group of ranks does together. `Comm` is this and messages between two ranks.

    Every method takes the whole world where `group` is None. Roots are global ranks. With `async_op=True` a
    method returns at once, with a `Work` whose `wait()` gives the result.

    Attributes:
        by_name: whether messages find each other by their tags; else by their order, which both ends then keep.
    """

    def __init__(
        self, rank: int, world_size: int, record: Recorder, device: torch.device, backend: str
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.world = Group(tuple(range(world_size)), None)
        self._wire = Wire(record, device, backend)
        self._gloo = backend == "gloo"
        self.by_name = backend != "nccl"
        self._groups = {self.world.ranks: self.world}

    # ---- groups -------------------------------------------------------------------------------------------

    def group(self, ranks: Sequence[int]) -> Group:
        """The group of these global ranks. Every rank of the run calls this, members or not, in the same order.

        Raises:
            ValueError: ranks that do not exist, or none, or one twice.
        """
        members = tuple(sorted(ranks))
        unique = len(set(members)) == len(members)
        if not members or not unique or not 0 <= members[0] <= members[-1] < self.world_size:
            raise ValueError(
                f"group({list(ranks)}) needs different ranks out of 0 to {self.world_size - 1}, at least one; "
                f"for all of them leave group=None"
            )
        return self._groups.get(members) or self.adopt(members, dist.new_group(list(members)))

    def adopt(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None) -> Group:
        """The group of these ranks, ascending, whose torch group there is already (or need not be: of one rank)."""
        if ranks not in self._groups:
            self._groups[ranks] = Group(ranks, handle)
        return self._groups[ranks]

    # ---- collectives where every rank gives and takes -----------------------------------------------------

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
        """Every rank ends with the sum (or "mean", "max", "min") of all ranks' tensors, in place.

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
            Kind.ALL_REDUCE, group, tensor.nbytes,
            lambda: dist.all_reduce(wire, reduction, group.handle, async_op=True), result,
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
        """Every rank ends with all ranks' tensors, one after the other in the first dimension.

        Args:
            tensor: (k, ...), the same shape on every rank. Returns (n k, ...), n the size of the group.
            group: None: all ranks.
            async_op: return a `Work` at once.
            out: (n k, ...), to be filled and returned; None: a new one. `tensor` may be this rank's part of it.
        """
        group = self._check(group, "all_gather")
        wire = self._wire.outgoing(tensor if tensor.dim() else tensor[None])
        whole = self._into(out, (group.size * wire.shape[0], *wire.shape[1:]), wire, "all_gather")
        work = self._collective(
            Kind.ALL_GATHER, group, group.size * tensor.nbytes,
            lambda: start_all_gather(whole, wire, group, self.rank, gloo=self._gloo),
            lambda: self._wire.arrived(whole, out),
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
        """The sum over ranks, of which each rank keeps its own n-th part of the first dimension.

        Args:
            tensor: (n k, ...), n the size of the group. Returns (k, ...).
            group: None: all ranks.
            async_op: return a `Work` at once.
            out: (k, ...), to be filled and returned; None: a new one. It may be this rank's part of `tensor`.
        """
        group = self._check(group, "reduce_scatter")
        part = self._part_shape(group, tensor, "reduce_scatter")
        wire = self._wire.outgoing(tensor)
        mine = self._into(out, part, wire, "reduce_scatter")
        work = self._collective(
            Kind.REDUCE_SCATTER, group, tensor.nbytes,
            lambda: start_reduce_scatter(mine, wire, group, gloo=self._gloo),
            lambda: self._wire.arrived(mine, out),
        )  # fmt: skip
        return work if async_op else work.wait()

    def all_to_all(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        """Part j of rank i's tensor becomes part i of rank j's: a transposition of parts.

        Args:
            tensor: (n k, ...), n the size of the group. Returns (n k, ...).
            group: None: all ranks.
        """
        group = self._check(group, "all_to_all")
        self._part_shape(group, tensor, "all_to_all")
        wire = self._wire.outgoing(tensor)
        swapped = self._wire.incoming(wire.shape, wire)
        return self._collective(
            Kind.ALL_TO_ALL, group, tensor.nbytes,
            lambda: dist.all_to_all_single(swapped, wire, group=group.handle, async_op=True),
            lambda: self._wire.arrived(swapped),
        ).wait()  # fmt: skip

    def barrier(self, group: Group | None = None) -> None:
        """Nobody goes on before everybody has come."""
        group = self._check(group, "barrier")
        nothing = torch.empty(0)
        self._collective(
            Kind.BARRIER, group, 0, lambda: dist.barrier(group.handle, async_op=True), lambda: nothing
        ).wait()

    # ---- collectives with a root --------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int = 0, group: Group | None = None) -> Tensor:
        """Every rank ends with rank `src`'s tensor, in place."""
        group = self._check(group, "broadcast", src)
        wire = self._wire.outgoing(tensor)
        return self._collective(
            Kind.BROADCAST, group, tensor.nbytes,
            lambda: dist.broadcast(wire, src, group.handle, async_op=True),
            lambda: self._wire.arrived(wire, tensor), src,
        ).wait()  # fmt: skip

    def reduce(
        self, tensor: Tensor, dst: int = 0, group: Group | None = None, *, in_place: bool = False
    ) -> Tensor:
        """Rank `dst` gets the sum of all ranks' tensors; the others get back their own.

        Args:
            tensor: any shape, the same on every rank.
            dst: the root.
            group: None: all ranks.
            in_place: the sum is written into `dst`'s tensor, and the others' may be left with anything.
        """
        group = self._check(group, "reduce", dst)
        wire = self._wire.outgoing(tensor)
        if not in_place:
            wire = wire.clone()  # gloo leaves partial sums in everybody's
        return self._collective(
            Kind.REDUCE, group, tensor.nbytes,
            lambda: dist.reduce(wire, dst, group=group.handle, async_op=True),
            lambda: self._wire.arrived(wire, tensor if in_place else None) if self.rank == dst else tensor, dst,
        ).wait()  # fmt: skip

    def gather(self, tensor: Tensor, dst: int = 0, group: Group | None = None) -> Tensor:
        """Rank `dst` ends with all ranks' tensors, one after the other in the first dimension.

        Args:
            tensor: (k, ...). Returns (n k, ...) on `dst`, an empty tensor on the others.
            dst: the root.
            group: None: all ranks.
        """
        group = self._check(group, "gather", dst)
        wire = self._wire.outgoing(tensor if tensor.dim() else tensor[None])
        rows = group.size * wire.shape[0] if self.rank == dst else 0
        whole = self._wire.incoming((rows, *wire.shape[1:]), wire)
        parts = list(whole.chunk(group.size)) if self.rank == dst else None
        return self._collective(
            Kind.GATHER, group, group.size * tensor.nbytes,
            lambda: dist.gather(wire, parts, dst, group.handle, async_op=True),
            lambda: self._wire.arrived(whole), dst,
        ).wait()  # fmt: skip

    def scatter(self, tensor: Tensor, src: int = 0, group: Group | None = None) -> Tensor:
        """Rank `src`'s tensor, of which each rank receives its own n-th part of the first dimension.

        Args:
            tensor: (n k, ...), of the same shape on every rank (only `src`'s values matter: the others may give one
                without memory, `torch.empty(1).expand(n * k)`). Returns (k, ...).
            src: the root.
            group: None: all ranks.
        """
        group = self._check(group, "scatter", src)
        part = self._part_shape(group, tensor, "scatter")
        wire = self._wire.outgoing(tensor) if self.rank == src else tensor
        mine = self._wire.incoming(part, wire)
        parts = list(wire.chunk(group.size)) if self.rank == src else None
        return self._collective(
            Kind.SCATTER, group, tensor.nbytes,
            lambda: dist.scatter(mine, parts, src, group.handle, async_op=True),
            lambda: self._wire.arrived(mine), src,
        ).wait()  # fmt: skip

    # ---- what they share ----------------------------------------------------------------------------------

    def _collective(
        self,
        kind: Kind,
        group: Group,
        nbytes: int,
        start: Callable[[], Any],
        result: Callable[[], Tensor],
        root: int = -1,
    ) -> Work:
        """The group's next collective."""
        number = group.issued
        group.issued += 1
        return self._wire.issue(kind, group.name, number, root, nbytes, start, result)

    def _check(self, group: Group | None, what: str, root: int | None = None) -> Group:
        group = group or self.world
        if self.rank not in group.ranks:
            raise ValueError(
                f"rank {self.rank} called {what} in the group of ranks {list(group.ranks)}, to which it does not "
                f"belong: only members call, as in `if ctx.rank in group.ranks: ctx.comm.{what}(...)`"
            )
        if root is not None and root not in group.ranks:
            raise ValueError(
                f"{what}: rank {root} is not one of the group's ranks {list(group.ranks)}; roots are global ranks"
            )
        return group

    def _into(self, out: Tensor | None, shape: tuple[int, ...], like: Tensor, what: str) -> Tensor:
        """What the backend fills: `out`, if it is given and the backend can."""
        if out is None or self._wire.staged:
            return self._wire.incoming(shape, like)
        if tuple(out.shape) != shape or out.dtype != like.dtype or not out.is_contiguous():
            raise ValueError(
                f"{what}(out=...) fills a contiguous tensor of shape {shape} and {like.dtype}; this one has shape "
                f"{tuple(out.shape)}, {out.dtype} and strides {out.stride()}: torch.empty({shape}, dtype={like.dtype})"
            )
        return out.detach()

    def _part_shape(self, group: Group, tensor: Tensor, what: str) -> tuple[int, ...]:
        """The shape of one of n equal parts."""
        if tensor.dim() == 0 or tensor.shape[0] % group.size:
            raise ValueError(
                f"{what} cuts the first dimension into {group.size} equal parts, one a rank, which a tensor of "
                f"shape {tuple(tensor.shape)} does not allow: pad it to a multiple of {group.size}"
            )
        return (tensor.shape[0] // group.size, *tensor.shape[1:])
