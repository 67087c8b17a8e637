"""Naive model parallelism: p stages on p ranks, of which one computes at any time.

    forward     the batch goes through the stages, from rank 0 to rank p - 1
    backward    the gradient goes back, from rank p - 1 to rank 0
    update      each rank its own stage

The bubble is (p - 1) / p.

Source: Huang et al., "GPipe", NeurIPS 2019, figure 2b.
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
    boundary: Sequence[int],
) -> list[float]:  # fmt: skip
    """Return the loss of each step, on the last rank.

    Args:
        ctx, stages, batches, loss, optimizer: see `mpkit.reference.arguments`.
        boundary: the shape of the activations between two stages.
    """
    stage, losses = Stage(ctx, stages[ctx.rank], loss, boundary), []
    update = optimizer(stage.module.parameters())
    for inputs, targets in batches:
        stage.begin_step(inputs, targets, m=1)
        # ---- forward
        stage.forward(0)
        # ---- backward
        stage.backward(0)
        # ---- update
        losses.append(stage.end_step(update))
    return losses
