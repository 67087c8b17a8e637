"""Silent bug 3: accumulated gradients.

Two people have worked on this loop. Each rank's share is too large for its memory, and goes through in micro-batches
whose gradients add up. The loss that is reported is the right one, and it falls. The learning rate "had to be tuned
anew" when the number of micro-batches changed.

It should be the same training as one device does with the whole batch, for any number of micro-batches and ranks; and
still with the activations of one micro-batch at a time (room for twice the outputs of all its layers).
`mk.compare("accumulated-gradients", train)` shows step by step where it is not. Look at the last column, how far
the weights have moved in the first step, as a multiple of how far they should have. (Weight decay blurs the factor a
little.) The inputs of this table have 3 micro-batches, on 2 ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the losses and the weights of the answer."""
    assert callable(answer)
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
    start="Run the program as it is, with `mk.compare`. The first loss is right. What was wrong with the "
    "first step?",
    mistakes=(
        Mistake(
            "still-scaled-twice",
            (
                "The first loss is right, the first step is not. Compare one gradient with serial training's: by "
                "which factor is it off? Does the factor change with the number of ranks, or of micro-batches?",
                "The gradient is too small by the number of micro-batches. Follow that number through the program: "
                "how often is something divided by it?",
                "Each loss is divided by `microbatches` already, so their gradients add up to the mean. The second "
                "division, after the all-reduce, is one too many.",
            ),
            [("parameter.grad /= ctx.world_size", "parameter.grad /= ctx.world_size * microbatches")],
        ),
        Mistake(
            "scaled-not-at-all",
            (
                "Now the steps are too large. What do gradients of several micro-batches do in `parameter.grad`?",
                "They add up. One of the two divisions is needed: keep that of the loss, or that of the gradient, "
                "and not none. (The losses that are reported need it as well.)",
            ),
            [("F.mse_loss(model(x), y) / microbatches", "F.mse_loss(model(x), y)")],
        ),
        Mistake(
            "learning-rate-multiplied",
            (
                "The weights are nearer, and still not equal. What else does the learning rate multiply?",
                "A rate that is larger makes up for a gradient that is too small, but weight decay grows with it. It "
                "is the gradient that is scaled twice: mend that.",
            ),
            [
                ("parameter.grad /= ctx.world_size", "parameter.grad /= ctx.world_size * microbatches"),
                ("lr=0.1", "lr=0.1 * microbatches"),
            ],
        ),
        Mistake(
            "divided-by-the-wrong-number",
            (
                "One division was too many. Which of the two numbers should have stayed?",
                "The all-reduce adds up over ranks, and nothing has divided by their number yet. It is the "
                "micro-batches that have been counted already, in the loss.",
            ),
            [("parameter.grad /= ctx.world_size", "parameter.grad /= microbatches")],
        ),
        Mistake(
            "one-backward-for-all",
            (
                "The weights are right. What did the micro-batches save before, and what do they save now?",
                "A backward of the sum needs the graphs of all micro-batches at once: then nothing is saved by cutting "
                "the share up. Leave each backward right after its forward, and mend the factor.",
            ),
            [
                (
                    "            loss = F.mse_loss(model(x), y) / microbatches\n            loss.backward()\n"
                    "            total += loss.detach()\n",
                    "            total = total + F.mse_loss(model(x), y) / microbatches\n",
                ),
                (
                    "        for parameter in model.parameters():",
                    "        total.backward()\n        total = total.detach()\n"
                    "        for parameter in model.parameters():",
                ),
            ],
            when=lambda seen: "peak" in seen.budget,
        ),
    ),
    otherwise=(
        "Follow one sample: with which factor does its error come into the loss, into `parameter.grad`, and into the "
        "sum over ranks? In the whole batch's mean it is 1/B.",
    ),
)
