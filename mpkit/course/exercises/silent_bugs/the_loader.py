"""Silent bug 2: the loader.

Four devices go through the data set, shuffled, a batch a step. The loss falls nicely on all of them, and the ranks
agree on every weight. Only the model is no better than the one that a single device trained in the same time.

On one device, step i of an epoch trains on `order[i * B : (i + 1) * B]`, where B is the whole batch and `order` the
shuffle of the epoch. Together the ranks should train on just these samples, each on its part of them. Which part a rank
takes does not matter.

`mk.compare("the-loader", train)` shows, step by step, the losses and the weights that differ. Here the very first
loss is wrong already, before any step was taken: so look at what goes in, not at what comes out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def train(
    ctx: mk.Context, model: nn.Module, data: tuple[Tensor, Tensor], batch: int, steps: int, seed: int
) -> list[float]:
    """Train for some steps of one epoch; return the losses.

    data: inputs (N, 6) and targets (N, 3), whole on every rank; batch: B, a multiple of ctx.world_size.
    """
    inputs, targets = data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    losses = []
    for step in range(steps):
        ### BEGIN SOLUTION
        # instead: share = batch // ctx.world_size
        # instead: mine = order[step * share : (step + 1) * share]
        share = batch // ctx.world_size
        begin = step * batch + ctx.rank * share
        mine = order[begin : begin + share]
        ### END SOLUTION
        loss = F.mse_loss(model(inputs[mine]), targets[mine])
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            ctx.comm.all_reduce(parameter.grad, op="mean")
        optimizer.step()
        losses.append(ctx.comm.all_reduce(loss.detach(), op="mean").item())
    return losses


# %% checks
BATCHES = 6


def size(case: Case) -> int:
    """Return B, the samples of a whole batch."""
    return 12 * case.ranks


def data(case: Case) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of one epoch."""
    return serial.batches(case, BATCHES * size(case), 1)[0]


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the losses and the weights of the answer."""
    assert callable(answer)
    model, seen = serial.model(case.seed), [0]

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[0] += len(inputs[0])

    model.register_forward_pre_hook(count)
    losses = answer(ctx, model, data(case), size(case), case["steps"], 7 * case.seed)
    return {**serial.outcome(losses, model), "samples": seen[0]}


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives."""
    x, y = data(case)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7 * case.seed))
    batches = [(x[some], y[some]) for some in order.split(size(case))]
    trained = serial.train(serial.model(case.seed), batches[: case["steps"]])
    return [{**trained, "samples": case["steps"] * size(case) // case.ranks}] * case.ranks


EXERCISE = OnRanks(
    solution=train,
    cases=(Case(2, 1, {"steps": 4}), Case(3, 2, {"steps": 3}), Case(4, 3, {"steps": 5})),
    play=play,
    expected=expected,
    result="losses, weights and samples",
    after="02-data-parallel",
    place=20,
    start="Run the program as it is, with `mk.compare`, and let each rank print the indices in `mine`.",
    mistakes=(
        Mistake(
            "still-the-same-samples",
            (
                "The first loss is wrong before any weight has changed. Which samples is it a mean over? Let every "
                "rank print `mine`.",
                "All ranks print the same. They shuffle with the same seed, which is right, and then take the same "
                "part of the order. The mean of equal gradients is one of them: three of four devices work for "
                "nothing.",
                "Step i belongs to `order[i * batch : (i + 1) * batch]`; of that, rank r takes `share` samples, "
                "beginning at `r * share`.",
            ),
            [
                (
                    "begin = step * batch + ctx.rank * share",
                    "begin = step * share",
                )
            ],
        ),
        Mistake(
            "a-seed-for-each-rank",
            (
                "The samples differ now. Is any taken twice in an epoch, by two ranks? Is any never taken?",
                "With a seed of its own each rank shuffles the data set for itself. Parts of different shuffles "
                "overlap, and leave samples out: that is another training, if one that looks well. All ranks need "
                "one order, and different parts of it.",
            ),
            [
                ("manual_seed(seed)", "manual_seed(seed + ctx.rank)"),
                ("begin = step * batch + ctx.rank * share", "begin = step * share"),
            ],
        ),
        Mistake(
            "each-rank-a-region",
            (
                "Every sample is taken once in an epoch now. Is it taken in the right step?",
                "You cut the order into one region a rank. On one device step i trains on the i-th run of `batch` "
                "samples; together the ranks have to take just these in step i.",
            ),
            [
                (
                    "begin = step * batch + ctx.rank * share",
                    "begin = ctx.rank * (len(order) // ctx.world_size) + step * share",
                )
            ],
        ),
        Mistake(
            "windows-that-overlap",
            (
                "Which samples does rank 1 take in step 0, and which does rank 0 take in step 1?",
                "The same: a step moves on by one share only, where all ranks together have taken a whole batch. "
                "Step i begins at `i * batch`.",
            ),
            [("step * batch + ctx.rank", "step * share + ctx.rank")],
        ),
        Mistake(
            "the-whole-batch-everywhere",
            (
                "The losses and weights are right. How many samples does each rank compute in a step?",
                "The whole batch on every rank is serial training, done several times. Each takes its share of it.",
            ),
            [("mine = order[begin : begin + share]", "mine = order[step * batch : (step + 1) * batch]")],
        ),
    ),
    otherwise=(
        "Write the indices of step 0 and step 1 of all ranks on paper, one line a rank. Joined, they have to be the "
        "first and the second `batch` entries of `order`.",
    ),
)
