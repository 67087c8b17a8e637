"""Buffers that the forward pass writes into, such as BatchNorm's running means, are kept equal on all ranks.

A buffer's version counter shows whether it has been written into. torch's kernel of BatchNorm moves the running
statistics without counting, but not the number of batches, so a module's buffers count as written into together.
Before the next step every rank then takes the first replica's values, as in PyTorch's DDP. The buffers of a BatchNorm
with statistics over the whole batch are equal anyway, and are not sent.
"""

from __future__ import annotations

from torch import Tensor, nn

from mpkit.common.torch_private import _BatchNorm
from mpkit.plan.plan import Plan
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.models.experts import MixtureOfExperts

__all__ = ["StatefulBuffers", "unequal_buffers"]


def unequal_buffers(plan: Plan, module: nn.Module) -> list[Tensor]:
    """Return the buffers that may differ between ranks: all but those of synchronized BatchNorms, and of routers."""
    equal = {
        id(buffer)
        for inner in module.modules()
        if isinstance(inner, MixtureOfExperts) or (isinstance(inner, _BatchNorm) and plan.batchnorm == "sync")
        for buffer in inner.buffers()
    }
    return [buffer for buffer in module.buffers() if id(buffer) not in equal]


class StatefulBuffers:
    """The buffers of a module, and a record of which of them change.

    Args:
        replicas: the ranks that hold the same module.
        plan: read for batchnorm.
        module: this rank's copy.
    """

    def __init__(self, replicas: Communicator, plan: Plan, module: nn.Module) -> None:
        self._replicas = replicas
        unequal = {id(buffer): buffer for buffer in unequal_buffers(plan, module)}
        self._of_modules = [
            [unequal.pop(id(buffer)) for buffer in inner.buffers(recurse=False) if id(buffer) in unequal]
            for inner in module.modules()
        ]
        self._versions = [_versions(buffers) for buffers in self._of_modules]

    def synchronize(self) -> None:
        """Take the first replica's buffers of modules where any changed since the last call; every rank calls it."""
        for i, buffers in enumerate(self._of_modules):
            if _versions(buffers) != self._versions[i]:
                for buffer in buffers:
                    self._replicas.broadcast(buffer)
                self._versions[i] = _versions(buffers)


def _versions(buffers: list[Tensor]) -> list[int]:
    return [buffer._version for buffer in buffers]
