"""Silent bug 7: an optimizer on the host."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Answer, Case
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def train(ctx: mk.Context, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train for one step per batch; return the losses. `batches` are whole ones, (B, 6) and (B, 3), on every rank.

    model: on the device. In the end it has the weights of the last step.
    """
    device = list(model.parameters())
    host = [nn.Parameter(weight.detach().clone().cpu()) for weight in device]
    optimizer = torch.optim.SGD(host, lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for inputs, targets in batches:
        mine = slice(ctx.rank, None, ctx.world_size)
        loss = F.mse_loss(model(inputs[mine]), targets[mine])
        loss.backward()
        # ---- gradients, to the host
        for weight, master in zip(device, host, strict=True):
            master.grad = ctx.comm.all_reduce(weight.grad, op="mean").cpu()
            weight.grad = None
        ### BEGIN SOLUTION
        # instead: # ---- weights, to the device
        # instead: for weight, master in zip(device, host, strict=True):
        # instead:     weight.data.copy_(master)
        # instead: # ---- step
        # instead: optimizer.step()
        # ---- step
        optimizer.step()
        # ---- weights, to the device
        for weight, master in zip(device, host, strict=True):
            weight.data.copy_(master)
        ### END SOLUTION
        losses.append(ctx.comm.all_reduce(loss.detach(), op="mean").item())
    return losses


# %% checks
SAMPLES = 48


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the losses and the device's weights."""
    model = serial.model(case.seed)
    return serial.outcome(answer(ctx, model, serial.batches(case, SAMPLES, case["steps"])), model)


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives."""
    return [serial.train(serial.model(case.seed), serial.batches(case, SAMPLES, case["steps"]))] * case.ranks


EXERCISE = OnRanks(
    solution=train,
    cases=(Case(2, 1, {"steps": 4}), Case(3, 2, {"steps": 4}), Case(4, 3, {"steps": 5})),
    play=play,
    expected=expected,
    result="losses and weights",
    after="03-zero",
    place=70,
)
