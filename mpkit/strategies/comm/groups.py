"""Groups: which ranks form a communicator.

group          every rank of the run creates a group once; its ranks identify it
adopt          a communicator for a group that torch has created
device_mesh    torch's groups along all axes of a mesh

These functions are methods of `Communicator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.comm.communicator import Communicator

__all__ = ["adopt", "device_mesh", "group"]


def group(self: Communicator, ranks: Sequence[int]) -> Communicator:
    """Return the communicator of these global ranks: pass it as `group`, or call its methods.

    Every rank of the run makes this call in the same order, whether it is a member or not. Two groups of the same ranks
    are two groups: a call of one of them does not match a call of the other.

    Raises:
        ValueError: there are no ranks, a rank does not exist, or a rank is given twice.
        CommMismatch: another rank creates a different group, or calls a collective of all ranks.
    """
    members = tuple(sorted(ranks))
    unique = len(set(members)) == len(members)
    if not members or not unique or not 0 <= members[0] <= members[-1] < self.world_size:
        raise ValueError(
            f"group({list(ranks)}) needs different ranks out of 0 to {self.world_size - 1}, at least one; "
            f"for all of them leave group=None"
        )
    known = self.wire.communicators.get(members)
    return self.adopt(members, _torch_group(self, members)) if known is None else known.sibling()


def adopt(self: Communicator, ranks: tuple[int, ...], handle: dist.ProcessGroup | None) -> Communicator:
    """Return the communicator of these ranks, in ascending order, for an existing torch group."""
    known = self.wire.communicators
    if ranks not in known:
        known[ranks] = self.subgroup(ranks, handle)
    return known[ranks]


def device_mesh(self: Communicator, device: torch.device, shape: Mapping[str, int]) -> DeviceMesh | None:
    """Create torch's mesh of all ranks, with the given name and length of each axis; its groups can be adopted.

    Every rank makes this call at the same time. A communicator whose groups need no real peers returns None.
    """
    ranks = torch.arange(self.world_size).view(*shape.values())
    return DeviceMesh(device.type, ranks, mesh_dim_names=tuple(shape))


def _torch_group(self: Communicator, ranks: tuple[int, ...]) -> Any:
    """Create torch's group, which is a collective of all ranks and takes a number among these."""
    wire = self.wire
    if wire.checks is None or wire.world_size == 1:
        return dist.new_group(list(ranks))
    world = wire.communicators[tuple(range(wire.world_size))]
    number = world.issued
    world.issued += 1
    call = wire.checks.group(world.ranks, number, ranks)
    waiting = wire.record.begin(
        Kind.WAIT, call.text, group=world.name, number=number, where=wire.find_source_line()
    )
    call.publish()
    handle = dist.new_group(list(ranks))
    call.compare()
    wire.record.end(waiting)
    return handle
