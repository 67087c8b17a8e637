"""An unused parameter."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import collectives
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def average_used(ctx: mk.Context, parameters: list[nn.Parameter]) -> None:
    """Replace each `parameter.grad`, a tensor or None, by its mean over ranks; None where every rank has None."""
    ### BEGIN SOLUTION
    used = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    ctx.comm.all_reduce(used)
    for parameter, count in zip(parameters, used.tolist(), strict=True):
        if count == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        ctx.comm.all_reduce(parameter.grad, op="mean")
    ### END SOLUTION


# %% checks
STEPS, SAMPLES = 4, 12


class Experts(nn.Module):
    """A model of three layers, of which the middle one is one of several experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(experts))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, expert: int | None) -> Tensor:
        """Return the outputs (samples, 3) for the inputs (samples, 6)."""
        x = torch.tanh(self.first(x))
        if expert is not None:
            x = torch.tanh(self.experts[expert](x))
        return self.last(x)


def chosen(case: Case, step: int, rank: int) -> int | None:
    """Choose the expert for a rank's samples: the last one is never used in step 1, and hardly ever by all ranks."""
    if step == 1:
        return None if rank == 0 else 0
    return (None, *range(case["experts"]))[(step + rank) % (case["experts"] + 1)]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the weights after some steps."""
    model = serial.fill(Experts(case["experts"]), case.seed)
    optimizer = serial.sgd(model)
    for step, batch in enumerate(serial.batches(case, SAMPLES, STEPS)):
        x, y = serial.share(batch, ctx.rank, ctx.world_size)
        optimizer.zero_grad()
        serial.mse(model(x, chosen(case, step, ctx.rank)), y).backward()
        answer(ctx, list(model.parameters()))
        optimizer.step()
    return serial.weights(model)


def expected(case: Case) -> list[object]:
    """Return the weights of serial training with all ranks' losses, each with its own expert."""
    model = copy.deepcopy(serial.fill(Experts(case["experts"]), case.seed))
    optimizer = serial.sgd(model)
    for step, batch in enumerate(serial.batches(case, SAMPLES, STEPS)):
        optimizer.zero_grad()
        for rank in range(case.ranks):
            x, y = serial.share(batch, rank, case.ranks)
            torch.autograd.backward(serial.mse(model(x, chosen(case, step, rank)), y) / case.ranks)
        optimizer.step()
    return [serial.weights(model)] * case.ranks


EXERCISE = OnRanks(
    solution=average_used,
    cases=(Case(2, 1, {"experts": 2}), Case(3, 2, {"experts": 3}), Case(4, 3, {"experts": 4})),
    play=play,
    expected=expected,
    result="weights after 4 steps",
    budgets=(
        Budget(
            "collectives in a step", lambda s: collectives(s) / STEPS, lambda case: 5 + 2 * case["experts"]
        ),
    ),
    after="02-data-parallel",
    place=100,
    when={
        "skips-what-it-has-not": lambda seen: seen.hang or seen.mismatch,
        "asks-nothing": lambda seen: "NoneType" in seen.error,
    },
)
