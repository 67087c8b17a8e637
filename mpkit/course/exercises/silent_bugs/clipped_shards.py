"""Silent bug 8: clipped shards.

ZeRO-1: every rank has the whole model, but an optimizer for its own parameters only, every n-th of them. After the
all-reduce of the gradients each rank clips, steps, and gives its parameters to the others. Clipping keeps the
gradient's norm from being larger than `max_norm`, without changing its direction:

    g  ←  g · min(1, max_norm / ‖g‖)          ‖g‖: over the gradients of all parameters

The program calls PyTorch's own `clip_grad_norm_`, as the program for one device does. The loss falls.

`mk.compare("clipped-shards", train)` shows which weights differ after each step. After the first step all do. The
last column says how far they have moved, as a multiple of how far they should have: the table is of 2 ranks, so the
first, third and fifth weight are rank 0's. What do the factors of one rank have in common?

Source of the norm over all: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the losses and the weights of the answer."""
    assert callable(answer)
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
    return [serial.outcome(losses, model)] * case.ranks


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
    start="Run the program as it is, with `mk.compare`. The first loss is right, the first step is not. Of "
    "which parameters does a rank have the gradients when it clips?",
    mistakes=(
        Mistake(
            "still-by-shard",
            (
                "Each rank's gradients have the right direction, and the wrong length. Which norm does a rank divide "
                "by?",
                "`clip_grad_norm_(mine, ...)` knows this rank's gradients only: each shard is clipped by its own "
                "norm, which is smaller than that of all. Shards are scaled by different factors, and the step has "
                "another direction.",
                "The squares of a norm add up: sum this rank's squares, all-reduce the sum, and take the root. Then "
                "scale by min(1, max_norm / norm).",
            ),
            [
                (
                    "        squares = torch.stack([parameter.grad.square().sum() for parameter in mine]).sum()\n",
                    "",
                ),
                (
                    "        norm = ctx.comm.all_reduce(squares).sqrt()\n",
                    "        nn.utils.clip_grad_norm_(mine, max_norm)\n",
                ),
                (
                    "        for parameter in mine:\n            parameter.grad *= (max_norm / norm).clamp(max=1.0)\n",
                    "",
                ),
            ],
        ),
        Mistake(
            "adds-norms",
            (
                "All ranks clip by the same norm now. Is it the right one? Try 2 ranks with norms 3 and 4.",
                "Together they have norm 5, not 7: it is the squares that add up. All-reduce the sum of squares, and "
                "take the root afterwards.",
            ),
            [("ctx.comm.all_reduce(squares).sqrt()", "ctx.comm.all_reduce(squares.sqrt())")],
        ),
        Mistake(
            "averages-squares",
            (
                "By which factor is your norm too small, with 2 ranks and with 3?",
                "By the root of the number of ranks. Shards are parts of one gradient, not several opinions about "
                "it: their squares add up, and nothing is averaged.",
            ),
            [("all_reduce(squares)", 'all_reduce(squares, op="mean")')],
        ),
        Mistake(
            "the-largest-shard-decides",
            (
                "Your norm is that of one shard, if the largest. Is the whole gradient's larger or smaller?",
                "Larger: the squares of all shards add up. A maximum is right for the max-norm, and not for this one.",
            ),
            [("all_reduce(squares)", 'all_reduce(squares, op="max")')],
        ),
        Mistake(
            "forgets-the-root",
            (
                "What is it that you divide `max_norm` by: a norm, or its square?",
                "The sum of squares is ‖g‖². Take the root of it, after the all-reduce.",
            ),
            [("ctx.comm.all_reduce(squares).sqrt()", "ctx.comm.all_reduce(squares)")],
        ),
        Mistake(
            "always-scales",
            (
                "What do you do with a gradient that is shorter than `max_norm`?",
                "Clipping leaves it alone. `max_norm / norm` is larger than 1 then, and blows it up: no factor above "
                "1.",
            ),
            [(".clamp(max=1.0)", "")],
        ),
    ),
    otherwise=(
        "Print the norm that each rank divides by, and the norm that `clip_grad_norm_` returns on one device with all "
        "gradients.",
    ),
)
