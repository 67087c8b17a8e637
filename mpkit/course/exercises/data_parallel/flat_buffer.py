"""One flat buffer.

Naive DDP sends one message a gradient. A model of a hundred layers has hundreds, most of them small, and each pays the
latency of the link. So put all gradients side by side into **one flat buffer**, all-reduce that, and cut it up again:

    grad 0 [8, 6]   grad 1 [8]   grad 2 [3, 8]            parameter.grad, as autograd left them
    └──────┬─────┘ └────┬────┘ └──────┬──────┘
    [ . . . . . . | . . . . | . . . . . . . . ]           flat: one all-reduce
    ┌──────┴─────┐ ┌────┴────┐ ┌──────┴──────┐
    grad 0 [8, 6]   grad 1 [8]   grad 2 [3, 8]            the mean over ranks

Write what happens between the backward and the step. One collective, and no byte more than the gradients have. A
gradient may lie in memory in any order: some here are not contiguous.
"""

from __future__ import annotations

import torch
from torch import nn

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
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
def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the gradients that the answer leaves after this rank's backward."""
    assert callable(answer)
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
    start="Three steps: flatten and join (`torch.cat`), all-reduce, cut up again (`Tensor.split` takes a list of "
    "sizes). Begin with the first, and print the length of the buffer: it is the number of parameters.",
    mistakes=(
        Mistake(
            "the-copy-is-averaged",
            (
                "The flat buffer is right. Are the gradients?",
                "`torch.cat` copies. What all_reduce leaves in the buffer does not come back to `parameter.grad` by "
                "itself: cut the buffer up, and put each part back in its parameter's shape.",
            ),
            [("        parameter.grad = part.view_as(parameter)\n", "        part.view_as(parameter)\n")],
        ),
        Mistake(
            "summed-not-averaged",
            (
                "Compare one number with the one expected. Which factor lies between?",
                "all_reduce adds up over ranks, and you want the mean: divide the buffer by `ctx.world_size`. "
                "(Dividing the one buffer is cheaper than dividing each gradient.)",
            ),
            [("    flat /= ctx.world_size\n", "")],
        ),
        Mistake(
            "one-for-each-gradient",
            (
                "The result is right. How many collectives did a rank call?",
                "An all-reduce for each gradient is naive DDP. Join the gradients first, and send them as one.",
            ),
            """
            def average_flat(ctx: mk.Context, parameters: list[nn.Parameter]) -> None:
                for parameter in parameters:
                    ctx.comm.all_reduce(parameter.grad)
                    parameter.grad /= ctx.world_size
            """,
            when=lambda seen: seen.budget == "collectives",
        ),
        Mistake(
            "cut-in-another-order",
            (
                "Numbers are there, in the wrong parameters. In which order were they joined, and in which cut up?",
                "The buffer holds the gradients in the order of `parameters`. Cut it in the same order, with the "
                "same sizes: a running offset, or `flat.split([p.numel() for p in parameters])`.",
            ),
            """
            def average_flat(ctx: mk.Context, parameters: list[nn.Parameter]) -> None:
                flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
                ctx.comm.all_reduce(flat)
                flat /= ctx.world_size
                for parameter in reversed(parameters):
                    parameter.grad, flat = flat[: parameter.numel()].view_as(parameter), flat[parameter.numel() :]
            """,
        ),
        Mistake(
            "takes-gradients-for-contiguous",
            (
                "`view` refuses some gradients. Do their numbers lie in memory one after the other?",
                "A view needs numbers that lie side by side. `flatten()` (or `reshape(-1)`) copies where they do not.",
            ),
            [("parameter.grad.flatten()", "parameter.grad.view(-1)")],
            when=lambda seen: "view size is not compatible" in seen.error,
        ),
        Mistake(
            "forgets-the-shape",
            (
                "What shape has a gradient, and what shape has its part of the buffer?",
                "A part of the flat buffer is one-dimensional; a gradient has its parameter's shape: "
                "`part.view_as(parameter)`.",
            ),
            [("part.view_as(parameter)", "part")],
            when=lambda seen: "shape" in seen.error or "size" in seen.error,
        ),
    ),
    otherwise=(
        "On one rank the mean is the gradient itself: after cutting up, each gradient must be what it was before "
        "joining. Try that without communication first.",
    ),
)
