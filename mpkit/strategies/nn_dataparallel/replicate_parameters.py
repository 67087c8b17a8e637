"""ReplicateParameters: rank 0 owns the parameters, and the others hold replicas while they compute.

    replicate       broadcast all of rank 0's parameters at once, and its buffers
    drop_replicas   free the replicas on the other ranks
    reduce          sum all ranks' gradients on rank 0, with one reduce per dtype

For that the parameters lie side by side in one tensor, and so do the gradients. torch.nn.DataParallel works in the same
way: a replica lives for one forward and its backward, and only the first GPU keeps the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.plan.plan import Plan
from mpkit.strategies.replicas.buffers import unequal_buffers

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["ReplicateParameters"]


class ReplicateParameters:
    """The parameters, buffers and gradients of one module, owned by rank 0.

    Args:
        context: this rank's context.
        plan: read for batchnorm.
        module: the whole model, on this rank's device; its parameters are moved into one tensor.
    """

    def __init__(self, context: Context, plan: Plan, module: nn.Module) -> None:
        self._comm, self._ledger = context.comm, context.record.ledger
        self._owns = context.rank == 0
        self._plan, self._module = plan, module
        # Parameters of larger dtypes first, so that each begins at a multiple of its element size.
        parameters = sorted(module.parameters(), key=lambda p: -p.itemsize)
        self._nbytes = sum(parameter.nbytes for parameter in parameters)
        self._flat = torch.empty(self._nbytes, dtype=torch.uint8, device=context.device)
        parts = self._flat.split([parameter.nbytes for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            whole = part.view(parameter.dtype).view(parameter.shape)
            parameter.data = whole.copy_(parameter.detach())
        self._ledger.track(self._flat, "params")
        self._by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in module.parameters():
            if parameter.requires_grad:
                self._by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._gradients: list[Tensor] = []  # those of a dtype side by side
        self.drop_replicas()

    # ---- parameters and buffers ---------------------------------------------------------------------------

    def replicate(self) -> None:
        """Replicate rank 0's parameters and buffers on all ranks."""
        self._resize(self._nbytes)
        self._comm.broadcast(self._flat)
        buffers = [buffer.detach() for buffer in unequal_buffers(self._plan, self._module) if buffer.numel()]
        if buffers:
            packed = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in buffers])
            parts = self._comm.broadcast(packed).split([buffer.nbytes for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                if not self._owns:
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def drop_replicas(self) -> None:
        """Free the replicas, so that only rank 0 holds parameters."""
        self._resize(0)

    def _resize(self, nbytes: int) -> None:
        if not self._owns:
            self._flat.untyped_storage().resize_(nbytes)
            self._ledger.track(self._flat, "params")

    # ---- gradients ----------------------------------------------------------------------------------------

    def begin_gradients(self) -> None:
        """Allocate zero gradients, if there are none; the backward adds into them in place."""
        if not self._gradients:
            for dtype, parameters in self._by_dtype.items():
                sizes = [parameter.numel() for parameter in parameters]
                flat = torch.zeros(sum(sizes), dtype=dtype, device=self._flat.device)
                for parameter, part in zip(parameters, flat.split(sizes), strict=True):
                    parameter.grad = part.view(parameter.shape)
                self._gradients.append(flat)
                self._ledger.track(flat, "grads")

    def reduce(self) -> None:
        """Sum all ranks' gradients on rank 0; the others free theirs."""
        for flat in self._gradients:
            self._comm.reduce(flat, in_place=True)
        if not self._owns:
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop all gradients."""
        for parameters in self._by_dtype.values():
            for parameter in parameters:
                parameter.grad = None
        self._gradients = []

    def count_used(self, used: list[bool]) -> list[int]:
        """Return on rank 0, for each answer, how many ranks said yes; every rank gives as many answers."""
        answers = torch.tensor(used, dtype=torch.int32, device=self._flat.device)
        return [int(count) for count in self._comm.reduce(answers).tolist()]
