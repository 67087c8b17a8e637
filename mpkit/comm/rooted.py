"""Collectives with a root: one rank sends to all ranks of a group, or receives from all.

    broadcast    root to all: the same tensor        reduce    all to root: the sum
    scatter      root to all: one part per rank      gather    all to root: the parts

Roots are global ranks. Payload is counted as in nccl-tests: the tensor for broadcast and reduce, and the whole
(gathered or not yet scattered) tensor for the others.

Source of the names and their meaning: the MPI standard, chapter 6, and torch.distributed.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from mpkit.comm.groups import Groups
from mpkit.comm.wire import Group
from mpkit.trace import Kind

__all__ = ["RootedCollectives"]


class RootedCollectives(Groups):
    """Collectives in which one rank, the root, sends or receives. With `group=None` every method uses all ranks."""

    def broadcast(self, tensor: Tensor, src: int = 0, group: Group | None = None) -> Tensor:
        """Copy rank `src`'s tensor into every rank's tensor, in place."""
        group = self._check(group, "broadcast", src)
        wire = self._wire.outgoing(tensor)
        return self._collective(
            Kind.BROADCAST, group, tensor, tensor.nbytes,
            lambda: dist.broadcast(wire, src, group.handle, async_op=True),
            lambda: self._wire.arrived(wire, tensor), src,
        ).wait()  # fmt: skip

    def reduce(
        self, tensor: Tensor, dst: int = 0, group: Group | None = None, *, in_place: bool = False
    ) -> Tensor:
        """Return the sum of all ranks' tensors on rank `dst`, and a rank's own tensor on the others.

        Args:
            tensor: any shape, the same on every rank.
            dst: the root.
            group: None: all ranks.
            in_place: write the sum into `dst`'s tensor; the contents of the other ranks' tensors are then undefined.
        """
        group = self._check(group, "reduce", dst)
        wire = self._wire.outgoing(tensor)
        if not in_place:
            wire = wire.clone()  # gloo leaves partial sums in every rank's tensor
        return self._collective(
            Kind.REDUCE, group, tensor, tensor.nbytes,
            lambda: dist.reduce(wire, dst, group=group.handle, async_op=True),
            lambda: self._wire.arrived(wire, tensor if in_place else None) if self.rank == dst else tensor, dst,
        ).wait()  # fmt: skip

    def gather(self, tensor: Tensor, dst: int = 0, group: Group | None = None) -> Tensor:
        """Return all ranks' tensors on rank `dst`, concatenated along the first dimension.

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
            Kind.GATHER, group, wire, group.size * tensor.nbytes,
            lambda: dist.gather(wire, parts, dst, group.handle, async_op=True),
            lambda: self._wire.arrived(whole), dst,
        ).wait()  # fmt: skip

    def scatter(self, tensor: Tensor, src: int = 0, group: Group | None = None) -> Tensor:
        """Scatter rank `src`'s tensor: each rank receives its own n-th part of the first dimension.

        Args:
            tensor: (n k, ...), of the same shape on every rank. Only `src`'s values matter: the others may pass a
                tensor without memory, `torch.empty(1).expand(n * k)`. Returns (k, ...).
            src: the root.
            group: None: all ranks.
        """
        group = self._check(group, "scatter", src)
        part = self._part_shape(group, tensor, "scatter")
        wire = self._wire.outgoing(tensor) if self.rank == src else tensor
        mine = self._wire.incoming(part, wire)
        parts = list(wire.chunk(group.size)) if self.rank == src else None
        return self._collective(
            Kind.SCATTER, group, tensor, tensor.nbytes,
            lambda: dist.scatter(mine, parts, src, group.handle, async_op=True),
            lambda: self._wire.arrived(mine), src,
        ).wait()  # fmt: skip
