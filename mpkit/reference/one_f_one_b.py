"""1F1B: one forward, one backward, so that a rank holds at most p micro-batches and not all m.

    warm-up      rank s computes its first min(m, p - 1 - s) forwards
    steady       one forward, then one backward, while there are forwards
    cool-down    the backwards that are left
    update       once, with the gradients of all micro-batches

The bubble is that of GPipe, (p - 1) / (m + p - 1); rank s holds at most p - s micro-batches.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.2.1 and figure 4.
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
        # ---- warm-up
        warm_up = min(m, ctx.world_size - 1 - ctx.rank)
        for i in range(warm_up):
            stage.forward(i)
        # ---- steady
        for i in range(warm_up, m):
            stage.forward(i)
            stage.backward(i - warm_up)
        # ---- cool-down
        for i in range(m - warm_up, m):
            stage.backward(i)
        # ---- update
        losses.append(stage.end_step(update))
    return losses
