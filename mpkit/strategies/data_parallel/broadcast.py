"""Broadcasts of one replica's tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mpkit.strategies.comm.communicator import Communicator

__all__ = ["broadcast_all", "broadcast_tensors"]

AT_ONCE = 8 * 2**20
"""Bytes per broadcast at the start: large enough to use the link well, and small beside a model."""


def broadcast_all(replicas: Communicator, module: nn.Module) -> None:
    """Broadcast the first replica's parameters and buffers."""
    broadcast_tensors(replicas, (*module.parameters(), *module.buffers()))


@torch.no_grad()
def broadcast_tensors(replicas: Communicator, tensors: Iterable[Tensor], source: int = 0) -> None:
    """Broadcast one replica's tensors to the others, in few broadcasts, none of which needs much memory."""
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
