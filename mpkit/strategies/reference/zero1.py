"""ZeRO-1, P_os: each of n ranks keeps the optimizer states of its n-th of every
parameter.

    forward, backward    of b / n samples; gradients are whole until the
                         backward is over
    reduce-scatter       gradients: rank r gets the mean of its shard
    update               the shard, with this rank's optimizer states
    all-gather           the updated shards, into everybody's parameters

A reduce-scatter and an all-gather are what an all-reduce consists of: the volume is
DDP's, 2 psi. Of Adam's 12 psi bytes of states a rank holds 12 psi / n.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020, section 5.1.
"""

from __future__ import annotations

from torch import nn

import mpkit as mk
from mpkit.strategies.reference.arguments import (
    Batches,
    Loss,
    Optimizer,
    shard_of,
    share_of,
)


def train(
    ctx: mk.Context, model: nn.Module, batches: Batches, loss: Loss,
    optimizer: Optimizer,
) -> list[float]:  # fmt: skip
    """Return the loss of this rank's samples at each step.
    Arguments: see `mpkit.strategies.reference.arguments`.
    """
    shards = [
        nn.Parameter(shard_of(ctx, parameter)) for parameter in model.parameters()
    ]
    update, losses = optimizer(shards), []
    for batch in batches:
        # ---- forward, backward
        inputs, targets = share_of(ctx, batch)
        value = loss(model(inputs), targets)
        (value / ctx.world_size).backward()
        # ---- reduce-scatter
        for parameter, shard in zip(model.parameters(), shards, strict=True):
            shard.grad = ctx.comm.reduce_scatter(parameter.grad.view(-1))
            parameter.grad = None
        # ---- update
        update.step()
        # ---- all-gather
        for parameter, shard in zip(model.parameters(), shards, strict=True):
            ctx.comm.all_gather(shard.detach(), out=parameter.data.view(-1))
        losses.append(value.item())
    return losses
