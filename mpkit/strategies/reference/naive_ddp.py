"""Naive DDP: every rank holds the model, computes its share of a batch, and averages
the gradients one by one.

    forward, backward    of b / n samples
    all-reduce           the gradient of each parameter, after the backward:
                         many small messages
    update               the same on every rank, so that the models stay equal

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020, section 3.2.1.
"""

from __future__ import annotations

from torch import nn

import mpkit as mk
from mpkit.strategies.reference.arguments import Batches, Loss, Optimizer, share_of


def train(
    ctx: mk.Context, model: nn.Module, batches: Batches, loss: Loss,
    optimizer: Optimizer,
) -> list[float]:  # fmt: skip
    """Return the loss of this rank's samples at each step.
    Arguments: see `mpkit.strategies.reference.arguments`.
    """
    update, losses = optimizer(model.parameters()), []
    for batch in batches:
        # ---- forward, backward
        inputs, targets = share_of(ctx, batch)
        value = loss(model(inputs), targets)
        value.backward()
        # ---- all-reduce
        for parameter in model.parameters():
            ctx.comm.all_reduce(parameter.grad, op="mean")
        # ---- update
        update.step()
        update.zero_grad()
        losses.append(value.item())
    return losses
