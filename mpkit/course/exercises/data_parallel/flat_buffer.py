"""One flat buffer."""

from __future__ import annotations

import torch
from torch import nn

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import collectives, payload
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def average_flat(ctx: mk.Context, parameters: list[nn.Parameter]) -> None:
    """Replace each `parameter.grad`, of any shape, by its mean over all ranks, with one all-reduce."""
    ### BEGIN SOLUTION
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    ctx.comm.all_reduce(flat)
    flat /= ctx.world_size
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    ### END SOLUTION


# %% checks
def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the gradients that the answer leaves after this rank's backward."""
    model = serial.model(case.seed)
    batch = serial.batches(case, case["samples"], 1)[0]
    x, y = serial.share(batch, ctx.rank, ctx.world_size)
    torch.autograd.backward(serial.mse(model(x), y))
    for parameter in model.parameters():
        if parameter.dim() == 2 and parameter.grad is not None and case["samples"] > 4:
            parameter.grad = parameter.grad.t().contiguous().t()
    answer(ctx, list(model.parameters()))
    return serial.gradients(model)


def expected(case: Case) -> list[object]:
    """Return the gradients of one backward over the whole batch."""
    model = serial.model(case.seed)
    x, y = serial.batches(case, case["samples"], 1)[0]
    torch.autograd.backward(serial.mse(model(x), y))
    return [serial.gradients(model)] * case.ranks


EXERCISE = OnRanks(
    solution=average_flat,
    cases=(Case(2, 1, {"samples": 4}), Case(3, 2, {"samples": 9}), Case(4, 3, {"samples": 8})),
    play=play,
    expected=expected,
    result="gradients",
    budgets=(
        Budget("collectives", collectives, 1),
        Budget("payload", payload, sum(p.nbytes for p in serial.model(0).parameters()), "bytes"),
    ),
    after="02-data-parallel",
    place=40,
    when={
        "one-for-each-gradient": lambda seen: seen.budget == "collectives",
        "takes-gradients-for-contiguous": lambda seen: "view size is not compatible" in seen.error,
        "forgets-the-shape": lambda seen: "shape" in seen.error or "size" in seen.error,
    },
)
