"""Silent bug 3: accumulated gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import peak
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def train(
    ctx: mk.Context, model: nn.Module, batches: list[tuple[Tensor, Tensor]], microbatches: int
) -> list[float]:
    """Train for one step per batch; return the losses. `batches` are whole ones, (B, 6) and (B, 3), on every rank.

    microbatches: how many each rank cuts its share into; all are of one size.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for inputs, targets in batches:
        mine = slice(ctx.rank, None, ctx.world_size)
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(inputs[mine].chunk(microbatches), targets[mine].chunk(microbatches), strict=True):
            loss = F.mse_loss(model(x), y) / microbatches
            loss.backward()
            total += loss.detach()
        ### BEGIN SOLUTION
        # instead: for parameter in model.parameters():
        # instead:     ctx.comm.all_reduce(parameter.grad)
        # instead:     parameter.grad /= ctx.world_size * microbatches
        for parameter in model.parameters():
            ctx.comm.all_reduce(parameter.grad)
            parameter.grad /= ctx.world_size
        ### END SOLUTION
        optimizer.step()
        losses.append(ctx.comm.all_reduce(total, op="mean").item())
    return losses


# %% checks
SAMPLES = 32


def samples(case: Case) -> int:
    """Return the size of a batch that has 32 samples in each micro-batch of each rank."""
    return SAMPLES * int(case["microbatches"]) * case.ranks


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the losses and the weights of the answer."""
    model = serial.model(case.seed)
    batches = serial.batches(case, samples(case), case["steps"])
    with Memory(ctx, model.parameters()):
        losses = answer(ctx, model, batches, case["microbatches"])
    return serial.outcome(losses, model)


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives."""
    batches = serial.batches(case, samples(case), case["steps"])
    return [serial.train(serial.model(case.seed), batches)] * case.ranks


EXERCISE = OnRanks(
    solution=train,
    cases=(
        Case(2, 1, {"microbatches": 3, "steps": 4}),
        Case(3, 2, {"microbatches": 2, "steps": 4}),
        Case(2, 3, {"microbatches": 4, "steps": 5}),
    ),
    play=play,
    expected=expected,
    result="losses and weights",
    budgets=(
        Budget(
            "peak of the activations of a rank", peak("activations"), 2 * serial.outputs(SAMPLES), "bytes"
        ),
    ),
    after="02-data-parallel",
    place=30,
    when={
        "one-backward-for-all": lambda seen: "peak" in seen.budget,
    },
)
