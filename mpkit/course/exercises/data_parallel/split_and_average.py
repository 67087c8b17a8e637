"""Split and average.

Four devices, one batch. Each rank has the whole model, and for once the whole batch too. It takes **its own share of
the samples**, computes the gradient of the mean loss over that share, and then all ranks agree on the mean of their
gradients. That is the gradient of the whole batch, because a gradient of a mean is a mean of gradients:

    ∇ 1/B Σ loss_i  =  1/n Σ over ranks ( ∇ n/B Σ over its own samples loss_i )

Write one such step. Every rank ends with the gradient of the whole batch in `parameter.grad` of each parameter. The
shares are of one size: the number of samples is a multiple of the number of ranks. No sample may be computed twice,
and each gradient may be all-reduced once: a rank sends at most 2(n-1)/n times the gradients' bytes. (It is the bytes on
the wire that count: a reduce-scatter and an all-gather together are one all-reduce, and some padding is free.)

`ctx.comm.all_reduce(tensor)` leaves the sum over all ranks in `tensor`, on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the gradients that the answer leaves, and how many samples went through this rank's model."""
    assert callable(answer)
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
    start="Three lines of serial training: forward, loss, backward. Which samples does this rank put in? "
    "`inputs[ctx.rank::ctx.world_size]` is one way to deal them. And afterwards: what do the ranks have to tell each "
    "other?",
    mistakes=(
        Mistake(
            "everybody-takes-everything",
            (
                "The gradients are right, but how many samples went through the model of one rank?",
                "If every rank computes the whole batch, four devices take as long as one. A rank takes its share "
                "only.",
                "`inputs[ctx.rank::ctx.world_size]`, and the same of `targets`.",
            ),
            [("slice(ctx.rank, None, ctx.world_size)", "slice(None)")],
        ),
        Mistake(
            "summed-not-averaged",
            (
                "Divide your gradient by the right one. Which number is that, and on what does it depend?",
                "all_reduce adds up. Each rank's loss is a mean over its own share already, so the whole batch's "
                "gradient is the mean of the ranks' gradients, not their sum.",
                "Divide by `ctx.world_size` after the all-reduce, or ask for `op='mean'`.",
            ),
            [("        parameter.grad /= ctx.world_size\n", "")],
        ),
        Mistake(
            "the-same-share-everywhere",
            (
                "Every rank took the right number of samples. Were they different ones?",
                "The mean of equal gradients is that same gradient: if all ranks take the first share, the rest of the "
                "batch is never seen. Where a share begins has to depend on `ctx.rank`.",
            ),
            [("slice(ctx.rank, None, ctx.world_size)", "slice(0, None, ctx.world_size)")],
        ),
        Mistake(
            "nobody-communicates",
            (
                "Does each rank end with the same gradient? It has seen only its own samples.",
                "After the backward a rank knows the gradient of its share. The others' have to come to it: all-reduce "
                "each `parameter.grad`.",
            ),
            [
                (
                    "    for parameter in model.parameters():\n        ctx.comm.all_reduce(parameter.grad)\n"
                    "        parameter.grad /= ctx.world_size\n",
                    "",
                )
            ],
        ),
        Mistake(
            "gathers-everything",
            (
                "Your gradients are right. How many bytes does a rank send, with 2 ranks, with 4, with 100?",
                "All-gather brings every rank's gradient to every rank: (n-1) times the gradient, each. A sum needs "
                "less than twice the gradient, whatever n is, since it is made on the way.",
                "`ctx.comm.all_reduce(parameter.grad)`.",
            ),
            [
                (
                    "        ctx.comm.all_reduce(parameter.grad)\n        parameter.grad /= ctx.world_size\n",
                    "        parameter.grad = ctx.comm.all_gather(parameter.grad[None]).mean(0)\n",
                )
            ],
            when=lambda seen: seen.budget == SENT,
        ),
        Mistake(
            "averages-the-sum-of-errors",
            (
                "Your gradient is off by the same factor everywhere. Over how many samples is the loss a mean?",
                "F.mse_loss is a mean over this rank's share. Dividing by the number of ranks twice makes the gradient "
                "too small: divide once, either the loss or the sum of the gradients.",
            ),
            [(".backward()", ".div(ctx.world_size).backward()")],
        ),
    ),
    otherwise=(
        "Print `parameter.grad` of one rank before and after you communicate, and compute by hand, on one device, "
        "what it should be: one backward of the whole batch.",
    ),
)
