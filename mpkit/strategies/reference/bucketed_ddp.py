"""Bucketed DDP: gradients are averaged in buckets, each as soon as it is full, while
the backward goes on.

    forward
    backward      a bucket whose gradients have all been made: start its all-reduce
    wait          for all all-reduces
    update        the same on every rank, so that the models stay equal

Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import vector_to_parameters

import mpkit as mk
from mpkit.strategies.reference.arguments import Batches, Loss, Optimizer, share_of


def train(
    ctx: mk.Context, model: nn.Module, batches: Batches, loss: Loss,
    optimizer: Optimizer, buckets: list[list[nn.Parameter]],
) -> list[float]:  # fmt: skip
    """Return the loss of this rank's samples at each step; `buckets` has the
    parameters of each, last ones first.
    """
    update, losses = optimizer(model.parameters()), []
    ready: list[int] = [0] * len(buckets)
    under_way: list[tuple[int, Any]] = []

    def count(k: int, _: nn.Parameter) -> None:
        ready[k] += 1
        if ready[k] == len(buckets[k]):
            gradients = torch.cat([parameter.grad.view(-1) for parameter in buckets[k]])
            work = ctx.comm.all_reduce(gradients, op="mean", async_op=True)
            under_way.append((k, work))
            ready[k] = 0

    for k, bucket in enumerate(buckets):
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(partial(count, k))
    for batch in batches:
        # ---- forward
        inputs, targets = share_of(ctx, batch)
        value = loss(model(inputs), targets)
        # ---- backward, with `count`
        value.backward()
        # ---- wait
        while under_way:
            k, work = under_way.pop(0)
            gradients = [parameter.grad for parameter in buckets[k]]
            vector_to_parameters(work.wait(), gradients)
        # ---- update
        update.step()
        update.zero_grad()
        losses.append(value.item())
    return losses
