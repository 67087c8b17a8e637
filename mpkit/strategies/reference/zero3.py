"""ZeRO-3, P_os+g+p: each rank keeps its n-th of everything, and a layer's parameters
are whole while it computes.

    forward     layer by layer: all-gather its parameters, compute, free them
    backward    layer by layer: all-gather again, compute; reduce-scatter the
                gradients, free both
    update      the shards

Each parameter is gathered twice and its gradient reduced once: 3 psi, 1.5 times DDP's
volume. Autograd keeps views of the gathered memory for the backward; that memory is
given back and taken again beneath them.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations...", SC 2020, sections
5.3 and 7.2.2.
"""

from __future__ import annotations

from torch import Tensor, nn

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
        parameter: nn.Parameter(shard_of(ctx, parameter).clone())
        for parameter in model.parameters()
    }
    update, losses = optimizer(shards.values()), []

    def gather(layer: nn.Module, *_: object) -> None:
        for parameter in layer.parameters(recurse=False):
            parameter.untyped_storage().resize_(parameter.nbytes)
            ctx.comm.all_gather(shards[parameter].detach(), out=parameter.data.view(-1))

    def free(layer: nn.Module, _: object, output: Tensor) -> None:
        # the backward of the layer begins
        output.register_hook(lambda gradient: gather(layer))
        for parameter in layer.parameters(recurse=False):
            parameter.untyped_storage().resize_(0)

    def reduce(parameter: nn.Parameter) -> None:
        shards[parameter].grad = ctx.comm.reduce_scatter(parameter.grad.view(-1))
        parameter.grad = None
        parameter.untyped_storage().resize_(0)

    for layer in model.modules():
        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(free)
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)
        parameter.register_post_accumulate_grad_hook(reduce)
    for batch in batches:
        # ---- forward, with `gather` and `free`
        inputs, targets = share_of(ctx, batch)
        value = loss(model(inputs), targets)
        # ---- backward, with `gather` and `reduce`
        (value / ctx.world_size).backward()
        # ---- update
        update.step()
        losses.append(value.item())
    return losses
