"""Flat DDP: as naive DDP, with all gradients in one buffer.

    forward, backward    of b / n samples
    all-reduce           of one buffer, after the backward: one large message, behind which nothing hides
    update               the same on every rank, so that the models stay equal

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.2.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

import mpkit as mk
from mpkit.strategies.reference.arguments import Batches, Loss, Optimizer, share_of

__all__ = ["train"]


def train(
    ctx: mk.Context, model: nn.Module, batches: Batches, loss: Loss, optimizer: Optimizer
) -> list[float]:
    """Return the loss of this rank's samples at each step. Arguments: see `mpkit.strategies.reference.arguments`."""
    update, losses = optimizer(model.parameters()), []
    for batch in batches:
        # ---- forward, backward
        inputs, targets = share_of(ctx, batch)
        value = loss(model(inputs), targets)
        value.backward()
        # ---- all-reduce
        gradients = torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])
        ctx.comm.all_reduce(gradients, op="mean")
        vector_to_parameters(gradients, [parameter.grad for parameter in model.parameters()])
        # ---- update
        update.step()
        update.zero_grad()
        losses.append(value.item())
    return losses
