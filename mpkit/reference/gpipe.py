"""GPipe: all micro-batches forward, then all of them backward.

    forward     F_0 ... F_(m-1); a rank holds the activations of all m micro-batches
    backward    B_(m-1) ... B_0
    update      once, with the gradients of all micro-batches

The bubble is (p - 1) / (m + p - 1).

Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3 and figure 2c.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import mpkit as mk
from mpkit.reference.arguments import Batches, Loss, Optimizer
from mpkit.reference.stage import Stage

__all__ = ["train"]


def train(
    ctx: mk.Context, stages: Sequence[nn.Module], batches: Batches, loss: Loss, optimizer: Optimizer,
    boundary: Sequence[int], m: int,
) -> list[float]:  # fmt: skip
    """Return the loss of each step, on the last rank.

    Args:
        ctx, stages, batches, loss, optimizer: see `mpkit.reference.arguments`.
        boundary: the shape of one micro-batch's activations between two stages.
        m: micro-batches per batch.
    """
    stage, losses = Stage(ctx, stages[ctx.rank], loss, boundary), []
    update = optimizer(stage.module.parameters())
    for inputs, targets in batches:
        stage.begin_step(inputs, targets, m)
        # ---- forward
        for i in range(m):
            stage.forward(i)
        # ---- backward
        for i in reversed(range(m)):
            stage.backward(i)
        # ---- update
        losses.append(stage.end_step(update))
    return losses
