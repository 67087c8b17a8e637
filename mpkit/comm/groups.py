"""Groups: which ranks communicate, and the code that all collectives of a group share.

group     every rank of the run creates a group once; its ranks identify it
check     the caller and the root are members; parts are equal; `out` can be filled
number    a group's collectives are counted: calls with the same number belong to the same collective
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mpkit.comm.call_checks import CallChecks
from mpkit.comm.wire import Group, Wire, Work
from mpkit.record.recorder import Recorder
from mpkit.trace import Kind

__all__ = ["Groups"]


class Groups:
    """The groups that a rank belongs to, and this rank's end of their collectives.

    Attributes:
        by_name: whether messages are matched by tag; otherwise they are matched by order, which both ends must keep.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        record: Recorder,
        device: torch.device,
        backend: str,
        checks: CallChecks | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.world = Group(tuple(range(world_size)), None)
        self._wire = Wire(record, device, backend)
        self._checks = checks  # None: calls are not compared with their peers'
        self._gloo = backend == "gloo"
        self.by_name = backend != "nccl"
        self._groups = {self.world.ranks: self.world}

    def group(self, ranks: Sequence[int]) -> Group:
        """Return the group of these global ranks.

        Every rank of the run makes this call in the same order, whether it is a member or not.

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
        return self._groups.get(members) or self.adopt(members, self._new_group(members))

    def _new_group(self, ranks: tuple[int, ...]) -> Any:
        """Create torch's group, which is a collective of all ranks and takes a number among these."""
        if self._checks is None or self.world_size == 1:
            return dist.new_group(list(ranks))
        number = self.world.issued
        self.world.issued += 1
        call = self._checks.group(self.world.ranks, number, ranks)
        record = self._wire.record
        waiting = record.begin(
            Kind.WAIT, call.text, group=self.world.name, number=number, where=self._wire.where()
        )
        call.publish()
        handle = dist.new_group(list(ranks))
        call.compare()
        record.end(waiting)
        return handle

    def adopt(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None) -> Group:
        """Return the group of these ranks, in ascending order, for an existing torch group.

        A group of one rank needs no torch group: `handle` is None.
        """
        if ranks not in self._groups:
            self._groups[ranks] = Group(ranks, handle)
        return self._groups[ranks]

    def device_mesh(self, device: torch.device, shape: Mapping[str, int]) -> DeviceMesh | None:
        """Create torch's mesh of all ranks, with the given name and length of each axis; its groups can be adopted.

        Every rank makes this call at the same time. Returns None where there is only one rank.
        """
        ranks = torch.arange(self.world_size).view(*shape.values())
        return DeviceMesh(device.type, ranks, mesh_dim_names=tuple(shape))

    def _collective(
        self,
        kind: Kind,
        group: Group,
        tensor: Tensor,
        nbytes: int,
        start: Callable[[], Any],
        result: Callable[[], Tensor],
        root: int = -1,
        *,
        reduction: str = "",
        waits: bool = True,
    ) -> Work:
        """Issue the group's next collective.

        Args:
            kind, nbytes, start, result, root, waits: as in `Wire.issue`.
            group: the group that communicates.
            tensor: has the dtype and shape that all members must pass.
            reduction: the reduction that all members must name.
        """
        number = group.issued
        group.issued += 1
        call = None
        if self._checks is not None and len(group.ranks) > 1:
            call = self._checks.collective(group.ranks, number, kind, tensor, root, reduction)
        return self._wire.issue(kind, group.name, number, root, nbytes, start, result, waits=waits, call=call)

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
        """Return the tensor that the backend fills: `out` if it is given and the backend can fill it."""
        if out is None or self._wire.staged:
            return self._wire.incoming(shape, like)
        if tuple(out.shape) != shape or out.dtype != like.dtype or not out.is_contiguous():
            raise ValueError(
                f"{what}(out=...) fills a contiguous tensor of shape {shape} and {like.dtype}; this one has shape "
                f"{tuple(out.shape)}, {out.dtype} and strides {out.stride()}: torch.empty({shape}, dtype={like.dtype})"
            )
        return out.detach()

    def _part_shape(self, group: Group, tensor: Tensor, what: str) -> tuple[int, ...]:
        """Return the shape of one of n equal parts."""
        if tensor.dim() == 0 or tensor.shape[0] % group.size:
            raise ValueError(
                f"{what} cuts the first dimension into {group.size} equal parts, one per rank, which a tensor of "
                f"shape {tuple(tensor.shape)} does not allow: pad it to a multiple of {group.size}"
            )
        return (tensor.shape[0] // group.size, *tensor.shape[1:])
