"""Replica: rank 0 owns the parameters, and the others hold a replica while they compute.

    replicate   broadcast all of rank 0's parameters at once, and its buffers
    drop        free the replica on the other ranks
    reduce      sum all ranks' gradients on rank 0, with one reduce per dtype

For that the parameters of a dtype lie side by side in one tensor, and so do their gradients. torch.nn.DataParallel
works in the same way: a replica lives for one forward and its backward, and only the first GPU keeps the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.plan.plan import Plan
from mpkit.strategies.replicas.buffers import broadcast_tensors, unequal_buffers

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["Replica"]


class Replica:
    """The parameters, buffers and gradients of one module, owned by rank 0.

    Args:
        context: this rank's context.
        plan: read for batchnorm.
        module: the whole model, on this rank's device; its parameters are moved into one tensor per dtype.
    """

    def __init__(self, context: Context, plan: Plan, module: nn.Module) -> None:
        self._comm, self._ledger = context.comm, context.record.ledger
        self._owns = context.rank == 0
        self._plan, self._module = plan, module
        self._trained: list[list[nn.Parameter]] = []  # by dtype
        self._flats: list[Tensor] = []
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in module.parameters():
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=context.device)
            for parameter, part in zip(parameters, flat.split(sizes), strict=True):
                parameter.data = part.view(parameter.shape).copy_(parameter.detach())
            self._ledger.track(flat, "params")
            self._flats.append(flat)
            self._trained.append([parameter for parameter in parameters if parameter.requires_grad])
        self._nbytes = [flat.nbytes for flat in self._flats]
        self._gradients: list[Tensor] = []  # those of a dtype side by side
        self.drop()

    def replicate(self) -> None:
        """Replicate rank 0's parameters and buffers on all ranks."""
        for flat, nbytes in zip(self._flats, self._nbytes, strict=True):
            self._resize(flat, nbytes)
            self._comm.broadcast(flat)
        broadcast_tensors(self._comm, (b for b in unequal_buffers(self._plan, self._module) if b.numel()))

    def drop(self) -> None:
        """Free the replica, so that only rank 0 holds parameters."""
        for flat in self._flats:
            self._resize(flat, 0)

    def _resize(self, flat: Tensor, nbytes: int) -> None:
        if not self._owns:
            flat.untyped_storage().resize_(nbytes)
            self._ledger.track(flat, "params")

    def begin_gradients(self) -> None:
        """Allocate zero gradients, if there are none; the backward adds into them in place."""
        if self._gradients:
            return
        for parameters in filter(None, self._trained):
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=self._flats[0].device)
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
        for parameters in self._trained:
            for parameter in parameters:
                parameter.grad = None
        self._gradients = []
