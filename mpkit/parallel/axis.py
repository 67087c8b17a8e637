"""Axis: a rank's line of the mesh, and what the ranks on that line do together.

A rank at place (pp, dp, cp, tp) belongs to one group along each axis: those that differ from it in that coordinate
only. What is sent along one axis is never seen on another, so a strategy is given its axis and knows no other.

    replicas     dp x cp: who holds the same weights, and computes on other samples, or other parts of a sequence
    model        pp x tp: who together hold one model
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mpkit.mesh import AXES, Mesh
from mpkit.parallel.comm import Comm, Group, Work

__all__ = ["Axis", "Line", "MeshAxes", "Pretended", "Waiting"]


class Waiting(Protocol):
    """What is under way, such as a `Work`."""

    def wait(self) -> Tensor:
        """Until it is complete; the result."""


class Line(Protocol):
    """What a strategy needs to know of its axis: how many are on it, and how to talk to them.

    Attributes:
        size: how many ranks, n.
        index: this one's place among them, 0 to n - 1.
    """

    size: int
    index: int

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """The sum ("max", "min", "mean") over the line, in place."""

    def start_all_reduce(self, tensor: Tensor) -> Waiting:
        """The sum, under way."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(k, ...) -> (n k, ...): everybody's, in the order of their places."""

    def start_all_gather(self, tensor: Tensor) -> Waiting:
        """The same, under way."""

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """(n k, ...) -> (k, ...): this rank's part of the sum."""

    def start_reduce_scatter(self, tensor: Tensor) -> Waiting:
        """The same, under way."""

    def isend(self, tensor: Tensor, to: int, tag: int | str = 0) -> Waiting:
        """Start sending to place `to`."""

    def irecv(self, buffer: Tensor, source: int, tag: int | str = 0) -> Waiting:
        """Start receiving from place `source` into a contiguous buffer."""


class Axis:
    """A group of ranks as one of them sees it. Everything goes through `Comm`, and is recorded; alone, nothing is sent.

    Args:
        comm: of this rank.
        ranks: of the group, global, ascending; None: all ranks.

    Attributes:
        group: as `Comm` has it.
        ranks: global ones, by place.
        size: n.
        index: this rank's place.
    """

    def __init__(self, comm: Comm, group: Group | None = None) -> None:
        self._comm = comm
        self.group = group or comm.world
        self.ranks = self.group.ranks
        self.size = len(self.ranks)
        self.index = self.ranks.index(comm.rank)

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """As `Comm.all_reduce`, on this line."""
        return tensor if self.size == 1 else self._comm.all_reduce(tensor, self.group, op=op)

    def start_all_reduce(self, tensor: Tensor) -> Waiting:
        """The same, under way."""
        if self.size == 1:
            return Arrived(tensor)
        return self._comm.all_reduce(tensor, self.group, async_op=True)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """As `Comm.all_gather`, on this line."""
        return tensor if self.size == 1 else self._comm.all_gather(tensor, self.group)

    def start_all_gather(self, tensor: Tensor, out: Tensor | None = None) -> Waiting:
        """The same, under way."""
        if self.size == 1:
            return Arrived(_into(out, tensor))
        return self._comm.all_gather(tensor, self.group, async_op=True, out=out)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """As `Comm.reduce_scatter`, on this line."""
        return tensor if self.size == 1 else self._comm.reduce_scatter(tensor, self.group)

    def start_reduce_scatter(self, tensor: Tensor, out: Tensor | None = None) -> Waiting:
        """The same, under way."""
        if self.size == 1:
            return Arrived(_into(out, tensor))
        return self._comm.reduce_scatter(tensor, self.group, async_op=True, out=out)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Everybody ends with the tensor of the rank at place `src` of this line, in place."""
        return tensor if self.size == 1 else self._comm.broadcast(tensor, self.ranks[src], self.group)

    def gather(self, tensor: Tensor, dst: int = 0) -> Tensor:
        """(k, ...) -> (n k, ...) at place `dst`, an empty tensor elsewhere."""
        return tensor if self.size == 1 else self._comm.gather(tensor, self.ranks[dst], self.group)

    def isend(self, tensor: Tensor, to: int, tag: int | str = 0) -> Work:
        """Start sending to the rank at place `to` of this line."""
        return self._comm.isend(tensor, self.ranks[to], tag)

    def irecv(self, buffer: Tensor, source: int, tag: int | str = 0) -> Work:
        """Start receiving from the rank at place `source` of this line."""
        return self._comm.irecv(buffer, self.ranks[source], tag)


class Pretended:
    """A `Line` without ranks, for a dry run: what comes from the others has the right shape, and is this rank's own.

    >>> line = Pretended(4)
    >>> line.all_gather(torch.ones(2, 3)).shape, line.reduce_scatter(torch.ones(8, 3)).shape
    (torch.Size([8, 3]), torch.Size([2, 3]))

    Attributes:
        size, index: as an `Axis` has them.
        reduced, gathered: bytes of all results of all-reduces and all-gathers so far.
    """

    def __init__(self, size: int, index: int = 0) -> None:
        self.size, self.index = size, index
        self.reduced = self.gathered = 0

    def __deepcopy__(self, _: object) -> Pretended:
        return self  # a copy of a model has the same ranks to talk to

    def all_reduce(self, tensor: Tensor, *, op: str = "sum") -> Tensor:
        """The tensor itself."""
        self.reduced += tensor.nbytes
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Arrived:
        """The same, at once."""
        return Arrived(self.all_reduce(tensor))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(k, ...) -> (n k, ...)."""
        self.gathered += self.size * tensor.nbytes
        return torch.cat([tensor] * self.size)

    def start_all_gather(self, tensor: Tensor) -> Arrived:
        """The same, at once."""
        return Arrived(self.all_gather(tensor))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """(n k, ...) -> (k, ...)."""
        return tensor.chunk(self.size)[self.index].clone()

    def start_reduce_scatter(self, tensor: Tensor) -> Arrived:
        """The same, at once."""
        return Arrived(self.reduce_scatter(tensor))

    def isend(self, tensor: Tensor, to: int, tag: int | str = 0) -> Arrived:
        """Nobody gets it."""
        return Arrived(tensor)

    def irecv(self, buffer: Tensor, source: int, tag: int | str = 0) -> Arrived:
        """The buffer as it is."""
        return Arrived(buffer)


class Arrived(NamedTuple):
    """A communication with nobody: over as soon as it is asked for."""

    result: Tensor

    def wait(self) -> Tensor:
        """The result."""
        return self.result


def _into(out: Tensor | None, tensor: Tensor) -> Tensor:
    """Alone, what is gathered or scattered is what there is."""
    if out is None:
        return tensor
    if out.data_ptr() != tensor.data_ptr():
        out.copy_(tensor)
    return out


class MeshAxes:
    """The axes of a mesh, as one rank sees them. Every rank makes it, at the same time.

    The groups are torch's: a DeviceMesh makes them.

    >>> import mpkit as mk
    >>> def axes(ctx):
    ...     axes = MeshAxes(ctx.comm, ctx.device, Mesh(pp=2, tp=2))
    ...     return axes.of("tp").ranks, axes.of("pp").ranks, axes.of("pp", "tp").size, axes.of("dp").size
    >>> with mk.Cluster(ranks=4, device="cpu") as cluster:
    ...     cluster.run(axes)[1]
    ((0, 1), (1, 3), 4, 1)

    Args:
        comm: of this rank.
        device: this rank's.
        mesh: with as many places as there are ranks.
    """

    def __init__(self, comm: Comm, device: torch.device, mesh: Mesh) -> None:
        assert mesh.size == comm.world_size, f"{mesh} and {comm.world_size} ranks"
        self._comm, self.mesh = comm, mesh
        self.place = mesh.place(comm.rank)
        self._long = [axis for axis in AXES if getattr(mesh, axis) > 1]
        self._known: dict[tuple[str, ...], Axis] = {}
        self._mesh: DeviceMesh | None = None
        if len(self._long) > 1:  # else the only axis is the world
            shape = {axis: getattr(mesh, axis) for axis in self._long}
            self._mesh = comm.device_mesh(device, shape)

    def of(self, *axes: str) -> Axis:
        """This rank's line along an axis, or the plane of several. All ranks ask for the same, in the same order."""
        wanted = tuple(axis for axis in self._long if axis in axes)
        if wanted not in self._known:
            self._known[wanted] = Axis(self._comm, self._group(wanted))
        return self._known[wanted]

    def _group(self, axes: Sequence[str]) -> Group:
        if len(axes) == len(self._long):
            return self._comm.world
        ranks = self.mesh.group(self._comm.rank, *axes)
        if not axes or self._mesh is None:  # nothing is sent, and torch needs no group
            return self._comm.adopt(ranks, None)
        torch_mesh = self._mesh[tuple(axes)]
        flat = torch_mesh if len(axes) == 1 else torch_mesh._flatten("_".join(axes))
        return self._comm.adopt(ranks, flat.get_group())
