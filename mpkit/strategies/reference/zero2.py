"""ZeRO-2, P_os+g: as ZeRO-1, and each rank keeps the gradients of its shards only.

    forward
    backward          as soon as a parameter has its gradient: reduce-scatter it, keep
                      the shard, free the rest
    update            the shards
    all-gather        the updated shards, into everybody's parameters

The volume is DDP's, 2 psi; of the gradients a rank holds 2 psi / n bytes, and a layer's
while it is reduced.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020, section 5.2.
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
    shards = {
        parameter: nn.Parameter(shard_of(ctx, parameter))
        for parameter in model.parameters()
    }
    update, losses = optimizer(shards.values()), []

    def reduce(parameter: nn.Parameter) -> None:
        shards[parameter].grad = ctx.comm.reduce_scatter(parameter.grad.view(-1))
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    for batch in batches:
        # ---- forward
        inputs, targets = share_of(ctx, batch)
        value = loss(model(inputs), targets)
        # ---- backward, with `reduce`
        (value / ctx.world_size).backward()
        # ---- update
        update.step()
        # ---- all-gather
        for parameter, shard in shards.items():
            ctx.comm.all_gather(shard.detach(), out=parameter.data.view(-1))
        losses.append(value.item())
    return losses
