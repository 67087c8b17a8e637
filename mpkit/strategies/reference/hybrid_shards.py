"""Hybrid shards (HSDP, MiCS): ZeRO within groups of s neighbours, such as the GPUs of a
node; groups are replicas.

    groups            ranks k s to k s + s - 1 share the shards; every s-th rank has
                      the same shard
    forward
    backward          as soon as a parameter has its gradient: reduce-scatter it within
                      the group, and all-reduce this rank's shard of it over the groups
    update            the shards
    all-gather        the updated shards, within the group

Of 2 psi (n-1)/n between all ranks, 2 psi (s-1)/s stay within a group, and
2 psi/s (r-1)/r go between the r = n/s groups: less by s over the slow links. A rank
holds 1/s of the states instead of 1/n.

Sources: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel", VLDB 2023, section 3.2.2; Zhang et al., "MiCS: Near-linear Scaling for
Training Gigantic Model on Public Cloud", VLDB 2022.
"""

from __future__ import annotations

from torch import nn

import mpkit as mk
from mpkit.strategies.reference.arguments import Batches, Loss, Optimizer, share_of


def train(
    ctx: mk.Context, model: nn.Module, batches: Batches, loss: Loss,
    optimizer: Optimizer, s: int,
) -> list[float]:  # fmt: skip
    """Return the loss of this rank's samples at each step; s ranks share the
    shards of ZeRO-2.
    """
    # ---- groups
    n, replica, i = ctx.world_size, ctx.rank // s, ctx.rank % s
    neighbours = [ctx.comm.group(range(k, k + s)) for k in range(0, n, s)][replica]
    replicas = [ctx.comm.group(range(k, n, s)) for k in range(s)][i]
    shards = {
        p: nn.Parameter(p.detach().view(-1).chunk(s)[i]) for p in model.parameters()
    }
    update, losses = optimizer(shards.values()), []

    def reduce(parameter: nn.Parameter) -> None:
        shard = neighbours.reduce_scatter(parameter.grad.view(-1))
        shards[parameter].grad = replicas.all_reduce(shard)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    for batch in batches:
        # ---- forward
        inputs, targets = share_of(ctx, batch)
        value = loss(model(inputs), targets)
        # ---- backward, with `reduce`
        (value / n).backward()
        # ---- update
        update.step()
        # ---- all-gather
        for parameter, shard in shards.items():
            neighbours.all_gather(shard.detach(), out=parameter.data.view(-1))
        losses.append(value.item())
    return losses
