"""Split and average."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import wire
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def split_and_average(ctx: mk.Context, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Leave the gradient of the whole batch's mean squared error in `parameter.grad` on every rank.

    inputs: (B, 6), targets: (B, 3), the whole batch on every rank; B is a multiple of ctx.world_size.
    """
    ### BEGIN SOLUTION
    mine = slice(ctx.rank, None, ctx.world_size)
    F.mse_loss(model(inputs[mine]), targets[mine]).backward()
    for parameter in model.parameters():
        ctx.comm.all_reduce(parameter.grad)
        parameter.grad /= ctx.world_size
    ### END SOLUTION


# %% checks
SAMPLES = 12  # a multiple of 2, 3 and 4


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the gradients that the answer leaves, and how many samples went through this rank's model."""
    model, seen = serial.model(case.seed), [0]

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[0] += len(inputs[0])

    model.register_forward_pre_hook(count)
    answer(ctx, model, *serial.batches(case, SAMPLES, 1)[0])
    return {"samples": seen[0], "gradients": serial.gradients(model)}


def expected(case: Case) -> list[object]:
    """Return the gradients of one serial backward over the whole batch."""
    model = serial.model(case.seed)
    x, y = serial.batches(case, SAMPLES, 1)[0]
    torch.autograd.backward(serial.mse(model(x), y))
    return [{"samples": SAMPLES // case.ranks, "gradients": serial.gradients(model)}] * case.ranks


def once(case: Case) -> float:
    """Return the bytes that a rank sends for one all-reduce of each gradient, with one number of padding per rank."""
    padded = [-(-parameter.numel() // case.ranks) * 8 for parameter in serial.model(0).parameters()]
    return 2.0 * (case.ranks - 1) * sum(padded)


SENT = "bytes that a rank sends"

EXERCISE = OnRanks(
    solution=split_and_average,
    cases=(Case(2, seed=1), Case(3, seed=2), Case(4, seed=3)),
    play=play,
    expected=expected,
    result="samples and gradients",
    budgets=(Budget(SENT, wire, once, "bytes"),),
    after="02-data-parallel",
    place=10,
    when={
        "gathers-everything": lambda seen: seen.budget == SENT,
    },
)
