"""AxisGroup: the ranks along one axis of the mesh, and the collectives and messages among them.

A rank at place (pp, dp, cp, tp) belongs to one group along each axis: the ranks that differ from it in that coordinate
only. Communication along one axis never reaches another, so a strategy is given its own axis and needs no other.

    replicas     dp x cp: ranks that hold the same weights and compute on different samples or parts of a sequence
    model        pp x tp: ranks that together hold one model
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mpkit.comm.communicator import Communicator, Group, Work
from mpkit.comm.process_group import Completed, FakeGroup, Pending, ProcessGroup
from mpkit.plan.mesh import AXES, Mesh

__all__ = ["AxisGroup", "FakeGroup", "MeshAxes", "Pending", "ProcessGroup"]


class AxisGroup:
    """A group of ranks as seen by one of its members. Every operation goes through `Communicator` and is recorded.

    A group of one rank sends nothing.

    Args:
        comm: this rank's `Communicator`.
        group: the group as `Communicator.group` returns it; None: all ranks.

    Attributes:
        group: the group as `Communicator` knows it.
        ranks: the members' global ranks, by place.
        size: the number of members, n.
        index: this rank's place in the group.
    """

    def __init__(self, comm: Communicator, group: Group | None = None) -> None:
        self._comm = comm
        self.group = group or comm.world
        self.ranks = self.group.ranks
        self.size = len(self.ranks)
        self.index = self.ranks.index(comm.rank)

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """Reduce the tensors of the group's ranks in place, as `Communicator.all_reduce` does."""
        return tensor if self.size == 1 else self._comm.all_reduce(tensor, self.group, op=op)

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Start an all-reduce and return at once."""
        if self.size == 1:
            return Completed(tensor)
        return self._comm.all_reduce(tensor, self.group, async_op=True)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather the tensors of the group's ranks, as `Communicator.all_gather` does."""
        return tensor if self.size == 1 else self._comm.all_gather(tensor, self.group)

    def start_all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Pending:
        """Start an all-gather and return at once."""
        if self.size == 1:
            return Completed(_into(out, tensor))
        return self._comm.all_gather(tensor, self.group, async_op=True, out=out)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the sum of the group's tensors, as `Communicator.reduce_scatter` does."""
        return tensor if self.size == 1 else self._comm.reduce_scatter(tensor, self.group)

    def start_reduce_scatter(self, tensor: Tensor, out: Tensor | None = None) -> Pending:
        """Start a reduce-scatter and return at once."""
        if self.size == 1:
            return Completed(_into(out, tensor))
        return self._comm.reduce_scatter(tensor, self.group, async_op=True, out=out)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Copy the tensor of the rank at place `src` of this group into every member's tensor, in place."""
        return tensor if self.size == 1 else self._comm.broadcast(tensor, self.ranks[src], self.group)

    def gather(self, tensor: Tensor, dst: int = 0) -> Tensor:
        """Gather (k, ...) from every rank into (n k, ...) at place `dst`; return an empty tensor elsewhere."""
        return tensor if self.size == 1 else self._comm.gather(tensor, self.ranks[dst], self.group)

    def isend(self, tensor: Tensor, to: int, tag: int | str = 0) -> Work:
        """Start sending to the rank at place `to` of this group."""
        return self._comm.isend(tensor, self.ranks[to], tag)

    def irecv(self, buffer: Tensor, source: int, tag: int | str = 0) -> Work:
        """Start receiving from the rank at place `source` of this group."""
        return self._comm.irecv(buffer, self.ranks[source], tag)


def _into(out: Tensor | None, tensor: Tensor) -> Tensor:
    """Return the result of a gather or scatter in a group of one: the tensor itself, or `out` with a copy of it."""
    if out is None:
        return tensor
    if out.data_ptr() != tensor.data_ptr():
        out.copy_(tensor)
    return out


class MeshAxes:
    """The axes of a mesh as seen by one rank. Every rank creates this object at the same time.

    The process groups are torch's; a DeviceMesh creates them.

    >>> import mpkit as mk
    >>> def axes(ctx):
    ...     axes = MeshAxes(ctx.comm, ctx.device, Mesh(pp=2, tp=2))
    ...     return axes.of("tp").ranks, axes.of("pp").ranks, axes.of("pp", "tp").size, axes.of("dp").size
    >>> with mk.Cluster(ranks=4, device="cpu") as cluster:
    ...     cluster.run(axes)[1]
    ((0, 1), (1, 3), 4, 1)

    Args:
        comm: this rank's `Communicator`.
        device: this rank's device.
        mesh: a mesh with as many places as there are ranks.
    """

    def __init__(self, comm: Communicator, device: torch.device, mesh: Mesh) -> None:
        assert mesh.size == comm.world_size, f"{mesh} and {comm.world_size} ranks"
        self._comm, self.mesh = comm, mesh
        self.place = mesh.place(comm.rank)
        self._long = [axis for axis in AXES if getattr(mesh, axis) > 1]
        self._known: dict[tuple[str, ...], AxisGroup] = {}
        self._mesh: DeviceMesh | None = None
        if len(self._long) > 1:  # otherwise the only axis spans all ranks
            shape = {axis: getattr(mesh, axis) for axis in self._long}
            self._mesh = comm.device_mesh(device, shape)

    def of(self, *axes: str) -> AxisGroup:
        """Return this rank's group along one axis, or over several axes together.

        All ranks request the same groups in the same order.
        """
        wanted = tuple(axis for axis in self._long if axis in axes)
        if wanted not in self._known:
            self._known[wanted] = AxisGroup(self._comm, self._group(wanted))
        return self._known[wanted]

    def _group(self, axes: Sequence[str]) -> Group:
        if len(axes) == len(self._long):
            return self._comm.world
        ranks = self.mesh.group(self._comm.rank, *axes)
        if not axes or self._mesh is None:  # a group of one sends nothing and needs no torch group
            return self._comm.adopt(ranks, None)
        torch_mesh = self._mesh[tuple(axes)]
        flat = torch_mesh if len(axes) == 1 else torch_mesh._flatten("_".join(axes))
        return self._comm.adopt(ranks, flat.get_group())
