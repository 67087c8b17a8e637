"""DP: rank 0 holds the model, the batch and the optimizer, and lends them out for every
batch, in five exchanges.

    1 scatter      the inputs, n equal parts
    2 broadcast    the parameters; every rank computes the outputs of its part
    3 gather       the outputs; rank 0 computes the loss
    4 scatter      the gradient of the outputs; every rank computes its backward
    5 reduce       the gradients, summed on rank 0, which updates

Source: Li et al., "PyTorch Distributed", VLDB 2020, section 2.2; the
documentation of torch.nn.DataParallel.
"""

from __future__ import annotations

import torch
from torch import nn

import mpkit as mk
from mpkit.strategies.reference.arguments import Batches, Loss, Optimizer


def train(
    ctx: mk.Context, model: nn.Module, batches: Batches, loss: Loss,
    optimizer: Optimizer,
) -> list[float]:  # fmt: skip
    """Return the loss of each step, on rank 0.
    Arguments: see `mpkit.strategies.reference.arguments`.
    """
    update, losses = optimizer(model.parameters()), []
    for inputs, targets in batches:
        # ---- 1 scatter
        x = ctx.comm.scatter(inputs)
        # ---- 2 broadcast
        for parameter in model.parameters():
            ctx.comm.broadcast(parameter.detach())
        y = model(x)
        # ---- 3 gather
        outputs = ctx.comm.gather(y.detach())
        gradient = torch.empty(len(inputs), *y.shape[1:], dtype=y.dtype)
        value = torch.zeros(())
        if ctx.rank == 0:
            value = loss(outputs.requires_grad_(), targets)
            (gradient,) = torch.autograd.grad(value, outputs)
        # ---- 4 scatter
        y.backward(ctx.comm.scatter(gradient))
        # ---- 5 reduce
        for parameter in model.parameters():
            parameter.grad = ctx.comm.reduce(parameter.grad)
        if ctx.rank == 0:
            update.step()
        update.zero_grad()
        losses.append(value.item())
    return losses
