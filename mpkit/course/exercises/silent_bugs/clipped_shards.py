"""Silent bug 8: clipped shards."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import payload
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def train(
    ctx: mk.Context, model: nn.Module, batches: list[tuple[Tensor, Tensor]], max_norm: float
) -> list[float]:
    """Train for one step per batch; return the losses. `batches` are whole ones, (B, 6) and (B, 3), on every rank."""
    n, parameters = ctx.world_size, list(model.parameters())
    mine = parameters[ctx.rank :: n]
    optimizer = torch.optim.SGD(mine, lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for inputs, targets in batches:
        model.zero_grad()
        loss = F.mse_loss(model(inputs[ctx.rank :: n]), targets[ctx.rank :: n])
        loss.backward()
        for i, parameter in enumerate(parameters):
            total = ctx.comm.reduce(parameter.grad, dst=i % n) / n
            parameter.grad = total if i % n == ctx.rank else None
        ### BEGIN SOLUTION
        # instead: nn.utils.clip_grad_norm_(mine, max_norm)
        squares = torch.stack([parameter.grad.square().sum() for parameter in mine]).sum()
        norm = ctx.comm.all_reduce(squares).sqrt()
        for parameter in mine:
            parameter.grad *= (max_norm / norm).clamp(max=1.0)
        ### END SOLUTION
        optimizer.step()
        for i, parameter in enumerate(parameters):
            ctx.comm.broadcast(parameter, src=i % n)
        losses.append(ctx.comm.all_reduce(loss.detach(), op="mean").item())
    return losses


# %% checks
SAMPLES = 48


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the losses and the weights of the answer."""
    model = serial.model(case.seed)
    losses = answer(ctx, model, serial.batches(case, SAMPLES, case["steps"]), case["max_norm"])
    return serial.outcome(losses, model)


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives, with gradients clipped by their global norm."""
    model = serial.model(case.seed)
    optimizer = serial.sgd(model)
    losses = []
    for x, y in serial.batches(case, SAMPLES, case["steps"]):
        optimizer.zero_grad()
        loss = serial.mse(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), case["max_norm"])
        optimizer.step()
        losses.append(loss.item())
    return [serial.outcome(losses, model.float())] * case.ranks  # torch adds 1e-6 to the norm


def bound(case: Case) -> float:
    """Return enough bytes to scatter gradients, gather weights, and send a loss and a few numbers for the norm."""
    return 8 * float(case["steps"]) * (2 * sum(p.numel() for p in serial.model(0).parameters()) + 8)


EXERCISE = OnRanks(
    solution=train,
    cases=(
        Case(2, 1, {"max_norm": 0.3, "steps": 5}),
        Case(3, 2, {"max_norm": 0.2, "steps": 5}),
        Case(4, 3, {"max_norm": 100.0, "steps": 3}),
    ),
    play=play,
    expected=expected,
    result="losses and weights",
    budgets=(Budget("payload", payload, bound, "bytes"),),
    after="03-zero",
    place=80,
)
