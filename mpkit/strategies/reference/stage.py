"""A stage of a pipeline, on one rank, and the training loop: what every
pipeline schedule shares.

    F_i       receive micro-batch i from rank s - 1, compute the stage, send the
              activations to rank s + 1
    B_i       receive the gradient of these activations, compute the backward, send the
              gradient of the input
    update    once per step, each rank its own stage

A schedule is the order in which a rank calls `forward(i)` and `backward(i)`:
`naive_model_parallelism`, `gpipe` or `one_f_one_b`. Sends do not block, so ranks whose
orders fit together cannot deadlock.

Source: Huang et al., "GPipe: Easy Scaling with Micro-Batch Pipeline Parallelism",
NeurIPS 2019, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.strategies.reference.arguments import Batches, Loss, Optimizer


class Stage:
    """Stage s of p, on rank s.

    Args:
        ctx: of this rank.
        module: the layers of the stage.
        loss: the mean over samples, of (outputs, targets); called on the last rank.
        boundary: the shape of one micro-batch's activations between two stages,
            the same everywhere.
    """

    def __init__(
        self, ctx: mk.Context, module: nn.Module, loss: Loss, boundary: Sequence[int]
    ) -> None:
        self.ctx, self.module, self.loss, self.boundary = ctx, module, loss, boundary
        self.before, self.after = ctx.rank - 1, ctx.rank + 1
        self.is_first, self.is_last = ctx.rank == 0, ctx.rank == ctx.world_size - 1

    def begin_step(self, inputs: Tensor, targets: Tensor, m: int) -> None:
        """Cut a batch into m micro-batches of the same size."""
        self.m, self.inputs, self.targets = m, inputs.chunk(m), targets.chunk(m)
        self.x: dict[int, Tensor] = {}  # by micro-batch: the input of the stage
        self.y: dict[int, Tensor] = {}  # its output, with autograd's graph
        self.mean = torch.zeros(())
        self.sends: list[Any] = []

    def forward(self, i: int) -> None:
        """Compute F_i. Its activations are kept until B_i."""
        if self.is_first:
            x = self.inputs[i]
        else:
            x = self._receive(self.before, f"F{i}").requires_grad_()
        y = self.module(x)
        if self.is_last:
            y = self.loss(y, self.targets[i]) / self.m
            self.mean = self.mean + y.detach()
        else:
            self.sends.append(self.ctx.comm.isend(y.detach(), self.after, f"F{i}"))
        self.x[i], self.y[i] = x, y

    def backward(self, i: int) -> None:
        """Compute B_i. The gradients of the weights add up over micro-batches."""
        x, y = self.x.pop(i), self.y.pop(i)
        y.backward(None if self.is_last else self._receive(self.after, f"B{i}"))
        if not self.is_first:
            self.sends.append(self.ctx.comm.isend(x.grad, self.before, f"B{i}"))

    def end_step(self, optimizer: torch.optim.Optimizer) -> float:
        """Update the stage.
        Return the loss of the batch on the last rank, 0 on the others.
        """
        for send in self.sends:
            send.wait()
        optimizer.step()
        optimizer.zero_grad()
        return float(self.mean)

    def _receive(self, rank: int, tag: str) -> Tensor:
        dtype = next(self.module.parameters()).dtype
        return self.ctx.comm.recv(torch.empty(*self.boundary, dtype=dtype), rank, tag)


def train(
    ctx: mk.Context, schedule: Callable[[Stage], None], stages: Sequence[nn.Module],
    batches: Batches, loss: Loss, optimizer: Optimizer, boundary: Sequence[int],
    m: int = 1,
) -> list[float]:  # fmt: skip
    """Return the loss of each step, on the last rank.

    Args:
        ctx, stages, batches, loss, optimizer: see
            `mpkit.strategies.reference.arguments`.
        schedule: computes one step of a stage.
        boundary: the shape of one micro-batch's activations between two stages.
        m: micro-batches per batch.
    """
    stage, losses = Stage(ctx, stages[ctx.rank], loss, boundary), []
    update = optimizer(stage.module.parameters())
    for inputs, targets in batches:
        stage.begin_step(inputs, targets, m)
        schedule(stage)
        losses.append(stage.end_step(update))
    return losses
