"""MeshAxes: this rank's communicator along each axis of the mesh.

A rank at place (pp, dp, cp, tp) belongs to one group along each axis: the ranks that differ from it in that coordinate
only. Communication along one axis never reaches another, so a strategy receives its own axis and needs no other.

    replicas     dp x cp: ranks that hold the same weights and compute on different samples or parts of a sequence
    shards       dp_shard x cp: those among which ZeRO shards the weights; all replicas, unless the plan is hybrid
    model        pp x tp: ranks that together hold one model
    experts      ep: ranks, out of the replicas, that divide each layer's experts; dp_replicate x edp hold the same ones
"""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from mpkit.plan.mesh import Mesh
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.fake_group import OneRank


class MeshAxes:
    """The axes of a mesh as seen by one rank, with groups of torch's DeviceMesh. All ranks create it at the same time.

    >>> import mpkit as mk
    >>> def axes(ctx):
    ...     of = MeshAxes(ctx.comm, ctx.device, Mesh(pp=2, tp=2)).communicator_of
    ...     return of("tp").ranks, of("pp").ranks, of("pp", "tp").size, of("dp").size
    >>> with mk.Cluster(ranks=4, device="cpu") as cluster:
    ...     cluster.run(axes)[1]
    ((0, 1), (1, 3), 4, 1)
    """

    def __init__(self, comm: Communicator, device: torch.device, mesh: Mesh) -> None:
        assert mesh.size == comm.world_size, f"{mesh} and {comm.world_size} ranks"
        self._comm, self._device, self.mesh = comm, device, mesh
        self.place = mesh.place(comm.rank)
        self._known: dict[tuple[str, ...], Communicator] = {}
        self._meshes = {mesh.axes: self._device_mesh(device, mesh.axes)}
        if mesh.ep > 1:
            self._meshes[mesh.expert_axes] = self._device_mesh(device, mesh.expert_axes)

    def _device_mesh(self, device: torch.device, axes: Sequence[str]) -> DeviceMesh | None:
        """Create torch's mesh of the axes with more than one place; None if only one axis has, and spans all ranks."""
        shape = {axis: degree for axis in axes if (degree := self.mesh.degree(axis)) > 1}
        return self._comm.device_mesh(device, shape) if len(shape) > 1 else None

    def communicator_of(self, *axes: str) -> Communicator:
        """Return the communicator along one axis or several together; all ranks request them in the same order."""
        wanted = tuple(axis for axis in self.mesh.parts(*axes) if self.mesh.degree(axis) > 1)
        if wanted not in self._known:
            self._known[wanted] = self._communicator(wanted)
        return self._known[wanted]

    def leads(self, but: str = "") -> bool:
        """Return whether this rank counts, saves and returns what tp ranks replicate, or divide along the axis `but`.

        The first of the tp ranks does so for what they replicate; for what they divide, all of them do.
        """
        if but == "ep" and self.mesh.etp:
            but = "tp"  # its ranks hold parts of experts; or, if it is folded, different experts or replicas of them
        return but == "tp" or self.place.tp == 0

    def _communicator(self, axes: Sequence[str]) -> Communicator:
        if not axes:
            return OneRank(self._comm.wire)
        ranks = self.mesh.group(self._comm.rank, *axes)
        if len(ranks) == self.mesh.size:
            return self._comm
        mesh = self._meshes[self.mesh.axes_with(*axes)]
        if mesh is None:  # of fake peers, for which torch has no groups
            return self._comm.adopt(ranks, None)
        torch_mesh = mesh[tuple(axes)]
        flat = torch_mesh if len(axes) == 1 else torch_mesh._flatten("_".join(axes))
        return self._comm.adopt(ranks, flat.get_group())
