"""An uneven last batch, weighted right.

The data set rarely divides by the number of ranks. In the last batch of an epoch some ranks have fewer samples than
others, or **none at all**. A mean of the ranks' gradients then gives samples on a small share more weight than the
others:

    rank 0   x x x x    mean over 4           each of these counts 1/8 ...
    rank 1   x          mean over 1           ... and this one 1/2

Write what leaves the gradient of the mean loss over **all** samples in every `parameter.grad`, on every rank, and
returns that mean loss. A rank knows how many samples it has, not how many the others have; one small collective tells
it what all have together. The mean over no samples is nan, the sum is 0. And a collective needs all ranks, also those
without samples.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, payload
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def uneven(ctx: mk.Context, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error over all ranks' samples; leave its gradient in each `parameter.grad`.

    inputs: (k, 6), targets: (k, 3), this rank's samples; k differs from rank to rank, and may be 0.
    """
    ### BEGIN SOLUTION
    errors = F.mse_loss(model(inputs), targets, reduction="sum")
    mine = torch.stack([errors.detach(), torch.tensor(float(targets.numel()))])
    total, numbers = ctx.comm.all_reduce(mine)
    (errors / numbers).backward()
    for parameter in model.parameters():
        ctx.comm.all_reduce(parameter.grad)
    return total / numbers
    ### END SOLUTION


# %% checks
def bounds(case: Case, rank: int) -> slice:
    """Return which samples of the batch belong to a rank."""
    shares = case["samples"]
    return slice(sum(shares[:rank]), sum(shares[: rank + 1]))


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the loss, and the gradients that the answer leaves."""
    assert callable(answer)
    model = serial.model(case.seed)
    x, y = serial.batches(case, sum(case["samples"]), 1)[0]
    mine = bounds(case, ctx.rank)
    loss = answer(ctx, model, x[mine], y[mine])
    return {"loss": loss, "gradients": serial.gradients(model)}


def expected(case: Case) -> list[object]:
    """Return the loss and the gradients of one backward over all samples."""
    model = serial.model(case.seed)
    x, y = serial.batches(case, sum(case["samples"]), 1)[0]
    loss = serial.mse(model(x), y)
    torch.autograd.backward(loss)
    return [{"loss": loss.item(), "gradients": serial.gradients(model)}] * case.ranks


MODEL = list(serial.model(0).parameters())

EXERCISE = OnRanks(
    solution=uneven,
    cases=(
        Case(2, 1, {"samples": [4, 4]}),
        Case(2, 2, {"samples": [4, 1]}),
        Case(3, 3, {"samples": [3, 2, 2]}),
        Case(4, 4, {"samples": [2, 2, 1, 0]}),
    ),
    play=play,
    expected=expected,
    result="loss and gradients",
    budgets=(
        Budget("collectives", collectives, len(MODEL) + 2),
        Budget("payload", payload, sum(parameter.nbytes for parameter in MODEL) + 64, "bytes"),
    ),
    after="02-data-parallel",
    place=80,
    start="On paper: the mean over all samples is the sum of all errors, divided by the number of all samples. Which "
    "of the two does a rank know by itself? Which one needs a collective?",
    mistakes=(
        Mistake(
            "nan-from-an-empty-share",
            (
                "One rank has no samples at all. What is the mean of nothing?",
                "0/0 is nan, times 0 is still nan, and a nan on one rank makes a nan of everybody's sum. Take the "
                "sum of the errors, which is 0 for no samples, and divide by what all ranks have together.",
            ),
            """
            def uneven(ctx: mk.Context, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
                samples = ctx.comm.all_reduce(torch.tensor(float(len(inputs))))
                loss = F.mse_loss(model(inputs), targets) * len(inputs) / samples
                loss.backward()
                for parameter in model.parameters():
                    ctx.comm.all_reduce(parameter.grad)
                return ctx.comm.all_reduce(loss.detach())
            """,
            when=lambda seen: any(bool(torch.as_tensor(one["loss"]).isnan()) for one in seen.got),
        ),
        Mistake(
            "every-rank-counts-the-same",
            (
                "With shares of one size it is right. How much does one sample count on a rank that has only one?",
                "The mean over ranks of means over shares is not the mean over samples: a sample of a small share "
                "weighs more. Each rank's loss has to count by its number of samples.",
                "Sum the errors of this rank (`reduction='sum'`), and divide by what all ranks have together.",
            ),
            """
            def uneven(ctx: mk.Context, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
                loss = F.mse_loss(model(inputs), targets)
                loss.backward()
                for parameter in model.parameters():
                    ctx.comm.all_reduce(parameter.grad, op="mean")
                return ctx.comm.all_reduce(loss.detach(), op="mean")
            """,
        ),
        Mistake(
            "the-loss-of-one-rank",
            (
                "The gradients are fine. Whose loss do you return?",
                "A rank's own errors are those of its own samples. The mean over all needs the others' too: send the "
                "sum of errors together with the number, in one all-reduce.",
            ),
            [("return total / numbers", "return errors / numbers")],
        ),
        Mistake(
            "nobody-home",
            (
                "Which rank does not come to the collective, and why?",
                "A rank without samples has nothing to give, and yet the others wait for it: a collective is "
                "complete when all have called it. It takes part with zeros.",
            ),
            [("    (errors /", "    if len(inputs) == 0:\n        return total / numbers\n    (errors /")],
            when=lambda seen: "never came to" in seen.hang,
        ),
        Mistake(
            "no-gradient-without-samples",
            (
                "What is `parameter.grad` on the rank that has no samples?",
                "Without a backward it is None, and None cannot be summed. Give it zeros, "
                "`torch.zeros_like(parameter)`; or do the backward of an empty sum, which is 0 and has a gradient of "
                "zeros.",
            ),
            [("    (errors /", "    if len(inputs) > 0:\n        (errors /")],
            when=lambda seen: "NoneType" in seen.error,
        ),
        Mistake(
            "a-mean-over-samples-only",
            (
                "Your results are off by the same factor everywhere, in every case. How many numbers has a target?",
                "F.mse_loss is a mean over all numbers of the targets, not over samples only: a sample has "
                "`targets.shape[1]` of them. Count `targets.numel()`.",
            ),
            [("targets.numel()", "len(targets)")],
        ),
        Mistake(
            "summed-means",
            (
                "By which factor is it wrong where all shares are of one size?",
                "You add up means over shares. Their sum is too large by the number of ranks where shares are equal, "
                "and by no single number where they are not. Weigh each with its number of samples out of all.",
            ),
            """
            def uneven(ctx: mk.Context, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
                loss = F.mse_loss(model(inputs), targets)
                loss.backward()
                for parameter in model.parameters():
                    ctx.comm.all_reduce(parameter.grad)
                return ctx.comm.all_reduce(loss.detach())
            """,
        ),
    ),
    otherwise=(
        "Take 2 ranks with 3 samples and 1: work out by hand which factor each sample's gradient has in the mean "
        "over all 4, and which one your program gives it.",
    ),
)
