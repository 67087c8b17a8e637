"""Silent bug 6: batch norm on ranks.

Data parallelism, with a BatchNorm in the model. BatchNorm subtracts the mean of the **batch** and divides by its
deviation: the samples of a batch are no longer independent of each other. The program runs, the loss falls. With many
ranks and few samples on each, it falls less.

It should be the training that one device does with the whole batch. `mk.compare("batch-norm-on-ranks", train)`
shows that already the first loss is another one, though all weights are equal then and every rank has the right
samples. What does a rank compute, before any step, that needs more than its own samples?

Mend it in `normalize`. `SumOverRanks.apply(tensor, ctx.comm)` is an all-reduce that gradients flow through: each rank's
contribution has an influence on every rank's loss, so in the backward the gradients are summed over ranks as well.

Source: Ioffe & Szegedy, "Batch Normalization", 2015; `torch.nn.SyncBatchNorm` is what you are about to write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import payload
from mpkit.course.framework.on_ranks import OnRanks


# %% given
class SumOverRanks(torch.autograd.Function):
    """The sum over ranks, on every rank; gradients are summed over ranks as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Any) -> Tensor:
        """Sum the values."""
        ctx.comm = comm
        return comm.all_reduce(tensor.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients."""
        return ctx.comm.all_reduce(gradient.clone()), None


# %% answer
def normalize(ctx: mk.Context, x: Tensor) -> Tensor:
    """Normalize each channel to mean 0 and variance 1 over the whole batch. x: (k, channels), this rank's k samples."""
    ### BEGIN SOLUTION
    # instead: mean = x.mean(0)
    # instead: var = (x - mean).square().mean(0)
    samples = len(x) * ctx.world_size
    mean = SumOverRanks.apply(x.sum(0), ctx.comm) / samples
    var = SumOverRanks.apply((x - mean).square().sum(0), ctx.comm) / samples
    ### END SOLUTION
    return (x - mean) / (var + 1e-5).sqrt()


def train(ctx: mk.Context, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train for one step per batch; return the losses. `batches` are whole ones, (B, 6) and (B, 3), on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for inputs, targets in batches:
        mine = slice(ctx.rank, None, ctx.world_size)
        normal = normalize(ctx, model.first(inputs[mine]))
        outputs = model.last(torch.tanh(model.scale * normal + model.shift))
        loss = F.mse_loss(outputs, targets[mine])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            ctx.comm.all_reduce(parameter.grad, op="mean")
        optimizer.step()
        losses.append(ctx.comm.all_reduce(loss.detach(), op="mean").item())
    return losses


# %% checks
SAMPLES, CHANNELS = 12, 5


class Normed(nn.Module):
    """A model of two layers with a BatchNorm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, CHANNELS), nn.Linear(CHANNELS, 3)
        self.scale, self.shift = nn.Parameter(torch.ones(CHANNELS)), nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output on one device, with torch's own batch norm."""
        normal = F.batch_norm(self.first(x), None, None, self.scale, self.shift, training=True, eps=1e-5)
        return self.last(torch.tanh(normal))


def batches(case: Case) -> list[serial.Batch]:
    """Return batches with few samples per rank, so that the ranks' means differ."""
    return serial.batches(case, SAMPLES, case["steps"])


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the losses and the weights of the answer."""
    assert callable(answer)
    model = serial.fill(Normed(), case.seed)
    return serial.outcome(answer(ctx, model, batches(case)), model)


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives."""
    return [serial.train(serial.fill(Normed(), case.seed), batches(case))] * case.ranks


def bound(case: Case) -> float:
    """Return enough bytes for gradients, losses, and some numbers per channel."""
    numbers = sum(parameter.numel() for parameter in Normed().parameters()) + 1 + 12 * CHANNELS
    return 8 * float(case["steps"]) * numbers


EXERCISE = OnRanks(
    solution=train,
    cases=(Case(2, 1, {"steps": 4}), Case(3, 2, {"steps": 4}), Case(4, 3, {"steps": 4})),
    play=play,
    expected=expected,
    result="losses and weights",
    budgets=(Budget("payload", payload, bound, "bytes"),),
    after="02-data-parallel",
    place=60,
    start="Run the program as it is, with `mk.compare`. The first loss is wrong before any step. Print "
    "`mean` on every rank: which mean would one device subtract?",
    mistakes=(
        Mistake(
            "still-by-rank",
            (
                "The first loss is wrong, with the right weights and the right samples. Which line of the forward "
                "gives a sample another value when its neighbours in the batch change?",
                "Each rank subtracts the mean of its own share. On one device it is the mean of the whole batch. The "
                "statistics have to be taken over all ranks.",
                "Sum over samples and over ranks, with `SumOverRanks.apply(x.sum(0), ctx.comm)`; divide by the "
                "number of samples of all ranks. The same for the squared deviations from that mean.",
            ),
            [
                ("SumOverRanks.apply(x.sum(0), ctx.comm) / samples", "x.mean(0)"),
                (
                    "SumOverRanks.apply((x - mean).square().sum(0), ctx.comm) / samples",
                    "(x - mean).square().mean(0)",
                ),
            ],
        ),
        Mistake(
            "averages-variances",
            (
                "Is the mean right now? And is the mean of the ranks' variances the variance of the whole batch?",
                "Suppose each rank's samples are equal among themselves, and differ from rank to rank: every rank's "
                "variance is 0, the batch's is not. Deviations have to be taken from the mean of the whole batch, "
                "then squared and summed.",
            ),
            [
                (
                    "SumOverRanks.apply((x - mean).square().sum(0), ctx.comm) / samples",
                    "SumOverRanks.apply(x.var(0, unbiased=False), ctx.comm) / ctx.world_size",
                )
            ],
        ),
        Mistake(
            "statistics-without-gradient",
            (
                "The first loss is right now, the first step is not. Where does the gradient come through?",
                "Mean and variance depend on every sample, and so on the weights. If they come out of a plain "
                "all-reduce they are constants for autograd, and part of the gradient is missing: `SumOverRanks` "
                "carries it.",
            ),
            [
                ("SumOverRanks.apply(x.sum(0), ctx.comm)", "ctx.comm.all_reduce(x.detach().sum(0))"),
                (
                    "SumOverRanks.apply((x - mean).square().sum(0), ctx.comm)",
                    "ctx.comm.all_reduce((x - mean).detach().square().sum(0))",
                ),
            ],
        ),
        Mistake(
            "the-first-rank-s-statistics",
            (
                "All ranks subtract the same mean now. Of which samples is it?",
                "A broadcast makes rank 0's statistics everybody's. That they are equal hides that they are a "
                "share's, and not the batch's.",
            ),
            [
                (
                    "SumOverRanks.apply(x.sum(0), ctx.comm) / samples",
                    "SumOverRanks.apply(x.mean(0) * (ctx.rank == 0), ctx.comm)",
                ),
                (
                    "SumOverRanks.apply((x - mean).square().sum(0), ctx.comm) / samples",
                    "SumOverRanks.apply((x - mean).square().mean(0) * (ctx.rank == 0), ctx.comm)",
                ),
            ],
        ),
        Mistake(
            "divides-by-its-own-samples",
            (
                "By how many samples do you divide the sum over all ranks?",
                "`SumOverRanks` gives the sum over every rank's samples: a mean of it divides by the number of all "
                "of them, `len(x) * ctx.world_size`.",
            ),
            [("len(x) * ctx.world_size", "len(x)")],
        ),
    ),
    otherwise=(
        "Print mean and variance on every rank, and those of the whole batch on one device. Once they agree, and the "
        "first loss is right, look at the gradients.",
    ),
)
