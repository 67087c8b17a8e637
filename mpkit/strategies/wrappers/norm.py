"""Clipping by a norm over gradients that ranks hold in parts."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from mpkit.strategies.comm.communicator import Communicator

__all__ = ["clip"]


@torch.no_grad()
def clip(
    mine: Sequence[Tensor],
    everywhere: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    comm: Communicator,
    device: torch.device,
) -> Tensor:
    """Scale gradients down to a norm, as torch.nn.utils.clip_grad_norm_ does, and return the norm before.

    Args:
        mine: gradients that this rank alone holds.
        everywhere: gradients that each rank holds alike.
        max_norm: the largest norm.
        norm_type: p of the p-norm; inf for the largest element.
        comm: the ranks that hold the others.
        device: where the norm is computed.
    """
    p = float(norm_type)
    here, alike = (_power_sum(gradients, p, device) for gradients in (mine, everywhere))
    if p == inf:
        norm = torch.maximum(comm.all_reduce(here, op="max"), alike)
    else:
        norm = (comm.all_reduce(here) + alike) ** (1.0 / p)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)[0]  # of no dimension, as a gradient may be
    for gradient in (*mine, *everywhere):
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm[0].to(torch.float32)


def _power_sum(gradients: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """Return the sum of |g|^p over all elements, or the largest |g| for inf, (1,) in float64."""
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient in gradients:
        gradient = gradient.as_subclass(Tensor)  # of a part, whose norm users must not take
        if not gradient.numel():
            continue
        gradient = gradient.abs() if gradient.is_complex() else gradient
        if p == inf:
            total = torch.maximum(total, gradient.abs().max().to(total))
        else:
            total += torch.linalg.vector_norm(gradient.to(torch.float64), p).to(device) ** p
    return total
