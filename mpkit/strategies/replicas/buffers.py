"""Broadcasts of the first replica's parameters and buffers, which make and keep all replicas equal.

A buffer's version counter shows whether the forward has written into it. torch's kernel of BatchNorm updates the
running statistics without counting, but not the number of batches, so a module's buffers count as written together.
Before the next step every rank then takes the first replica's values, as in PyTorch's DDP. The buffers of a BatchNorm
with statistics over the whole batch are equal anyway, and are not sent.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mpkit.common.torch_private import _BatchNorm
from mpkit.plan.plan import Plan
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.models.experts import MixtureOfExperts
from mpkit.strategies.replicas.part import ReplicatedPart
from mpkit.strategies.stage.gradient_sync import GradientSync


def unequal_buffers(plan: Plan, module: nn.Module) -> list[Tensor]:
    """Return the buffers that may differ between ranks: all but those of synchronized BatchNorms and of routers."""
    equal = {
        id(buffer)
        for inner in module.modules()
        if isinstance(inner, MixtureOfExperts) or (isinstance(inner, _BatchNorm) and plan.batchnorm == "sync")
        for buffer in inner.buffers()
    }
    return [buffer for buffer in module.buffers() if id(buffer) not in equal]


class BufferedSync(GradientSync):
    """Gradients synchronized over replicas, with buffers that follow the first replica's."""

    def __init__(self, held: ReplicatedPart) -> None:
        super().__init__(held.stages)
        self._replicas, self._first_of_replicas = held.replicas, held.first_of_replicas
        self._record = held.context.record

    def watch_buffers(self, held: ReplicatedPart) -> None:
        """Note from now on which buffers change, once they equal the first replica's."""
        unequal = {id(buffer): buffer for buffer in unequal_buffers(held.plan, held.module)}
        self._of_modules = [
            [unequal.pop(id(buffer)) for buffer in inner.buffers(recurse=False) if id(buffer) in unequal]
            for inner in held.module.modules()
        ]
        self._versions = [_versions(buffers) for buffers in self._of_modules]

    def synchronize_buffers(self) -> None:
        """Take the first replica's buffers of modules where any changed since the last call; every rank calls it."""
        for i, buffers in enumerate(self._of_modules):
            if _versions(buffers) != self._versions[i]:
                for buffer in buffers:
                    self._replicas.broadcast(buffer)
                self._versions[i] = _versions(buffers)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Evaluate with the first replica's buffers."""
        self.synchronize_buffers()
        yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state on the first replica of each part, and nothing on the others."""
        self.synchronize_buffers()
        return self._first_of_replicas(super().state_dict())


def _versions(buffers: list[Tensor]) -> list[int]:
    return [buffer._version for buffer in buffers]


AT_ONCE = 8 * 2**20
"""Bytes per broadcast at the start: enough to use the link well, and little compared with a model."""


def broadcast_all(replicas: Communicator, module: nn.Module) -> None:
    """Broadcast the first replica's parameters and buffers."""
    broadcast_tensors(replicas, (*module.parameters(), *module.buffers()))


@torch.no_grad()
def broadcast_tensors(replicas: Communicator, tensors: Iterable[Tensor], source: int = 0) -> None:
    """Broadcast one replica's tensors to the others, `AT_ONCE` bytes at a time."""
    groups: list[list[Tensor]] = []
    open_groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        group = open_groups.get(tensor.dtype, [])
        if not group or sum(t.nbytes for t in group) + tensor.nbytes > AT_ONCE:
            group = open_groups[tensor.dtype] = []
            groups.append(group)
        group.append(tensor.detach())
    for group in groups:
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        replicas.broadcast(flat, source)
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(part.view_as(tensor))
