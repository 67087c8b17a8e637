"""Buffers that a forward writes into, such as BatchNorm's running means, kept the same on all ranks.

Which buffers those are shows when they have been written into. As torch's DDP does, everybody takes the first one's
before the next step. Those of a BatchNorm whose statistics are over the whole batch are equal without being sent.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpkit.parallel.axis import Axis
from mpkit.plan import Plan

__all__ = ["StatefulBuffers", "unequal_buffers"]


def unequal_buffers(plan: Plan, module: nn.Module) -> list[Tensor]:
    """The buffers that may come to differ between ranks: not those of statistics over the whole batch."""
    equal = {
        id(buffer)
        for inner in module.modules()
        if isinstance(inner, _BatchNorm) and plan.batchnorm == "sync"
        for buffer in inner.buffers()
    }
    return [buffer for buffer in module.buffers() if id(buffer) not in equal]


class StatefulBuffers:
    """The buffers of a module, and which of them change.

    Args:
        replicas: who has the same module.
        plan: batchnorm.
        module: on this rank.
    """

    def __init__(self, replicas: Axis, plan: Plan, module: nn.Module) -> None:
        self._replicas = replicas
        self._buffers = unequal_buffers(plan, module)
        self._versions = [buffer._version for buffer in self._buffers]

    def synchronize(self) -> None:
        """Take the first replica's values of those that changed since the last time; every rank calls it."""
        for i, buffer in enumerate(self._buffers):
            if buffer._version != self._versions[i]:
                self._replicas.broadcast(buffer)
                self._versions[i] = buffer._version
