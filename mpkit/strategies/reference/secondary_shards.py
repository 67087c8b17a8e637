"""hpZ of ZeRO++: ZeRO-3 whose backward gathers within groups of s neighbours, such as the GPUs of a node.

    forward     layer by layer: all-gather its parameters among all ranks, keep the s-th part of them, compute, free
    backward    layer by layer: all-gather the neighbours' parts, compute; reduce-scatter the gradients among all
    update      the shards: as in ZeRO-3, of whose 3 psi (n-1)/n a third is psi (s-1)/s now, for psi/s more memory

Source: Wang et al., "ZeRO++: Extremely Efficient Collective Communication...", arXiv 2306.10209, section 3.2.
"""

from __future__ import annotations

from torch import Tensor, nn

import mpkit as mk
from mpkit.strategies.reference.arguments import Batches, Loss, Optimizer, shard_of, share_of

__all__ = ["train"]


def train(
    ctx: mk.Context, model: nn.Module, batches: Batches, loss: Loss, optimizer: Optimizer, s: int
) -> list[float]:
    """Return the loss of this rank's samples at each step; s neighbours keep secondary shards together."""
    node = [ctx.comm.group(range(k, k + s)) for k in range(0, ctx.world_size, s)][ctx.rank // s]
    shards = {parameter: nn.Parameter(shard_of(ctx, parameter).clone()) for parameter in model.parameters()}
    update, losses, secondary = optimizer(shards.values()), [], dict[nn.Parameter, Tensor]()

    def gather(layer: nn.Module, *_: object) -> None:
        for parameter in layer.parameters(recurse=False):
            whole = parameter.data.view(-1)
            whole.untyped_storage().resize_(whole.nbytes)
            if parameter in secondary:  # in the backward
                ctx.comm.all_gather(secondary.pop(parameter), node, out=whole)
            else:
                ctx.comm.all_gather(shards[parameter].detach(), out=whole)
                secondary[parameter] = whole.chunk(s)[ctx.rank % s].clone()

    def free(layer: nn.Module, _: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: gather(layer))  # the backward of the layer begins
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
        parameter.register_post_accumulate_grad_hook(reduce)
    for inputs, targets in (share_of(ctx, batch) for batch in batches):
        # ---- forward, with `gather` and `free`
        losses.append(loss(model(inputs), targets))
        # ---- backward, with `gather` and `reduce`
        (losses[-1] / ctx.world_size).backward()
        # ---- update
        update.step()
    return [value.item() for value in losses]
