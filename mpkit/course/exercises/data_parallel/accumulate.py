"""Accumulate without sync.

A rank's share of the batch does not fit into its memory. So it is cut into m micro-batches: a forward and a backward
for each, one after the other, and the gradients add up in `parameter.grad`. Only then the optimizer steps. While
gradients add up nobody needs to know those of the other ranks: it is enough to send **once per step**, after the last
micro-batch. (PyTorch's DDP has the context manager `no_sync()` for that.)

Write the training loop of one rank. The gradient of a step is the one of the mean loss over the *whole* batch: all
micro-batches of all ranks, which are of one size. A rank holds the activations of one micro-batch at a time: for all
that a forward, its loss and its backward make there is room for twice the outputs of all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import calls, payload, peak
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.trace import Kind


# %% given
def average(ctx: mk.Context, model: nn.Module) -> None:
    """Naive DDP: replace each gradient by its mean over all ranks."""
    for parameter in model.parameters():
        ctx.comm.all_reduce(parameter.grad, op="mean")


# %% answer
def accumulate(
    ctx: mk.Context,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: list[list[tuple[Tensor, Tensor]]],
) -> None:
    """Train `model` by the mean squared error.

    steps: for each optimizer step the micro-batches of this rank, (inputs, targets) each, all of one size.
    """
    ### BEGIN SOLUTION
    for microbatches in steps:
        optimizer.zero_grad()
        for inputs, targets in microbatches:
            loss = F.mse_loss(model(inputs), targets) / len(microbatches)
            loss.backward()
        average(ctx, model)
        optimizer.step()
    ### END SOLUTION


# %% checks
STEPS = 3


SAMPLES = 32


def samples(case: Case) -> int:
    """Return the size of a batch that has 32 samples in each micro-batch of each rank."""
    return SAMPLES * int(case["microbatches"]) * case.ranks


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the weights after some steps."""
    assert callable(answer)
    model, m = serial.model(case.seed), case["microbatches"]
    steps = []
    for batch in serial.batches(case, samples(case), STEPS):
        x, y = serial.share(batch, ctx.rank, ctx.world_size)
        steps.append(list(zip(x.chunk(m), y.chunk(m), strict=True)))
    with Memory(ctx, model.parameters()):
        answer(ctx, model, serial.sgd(model), steps)
    return serial.weights(model)


def expected(case: Case) -> list[object]:
    """Return the weights of serial training, with one step per whole batch."""
    trained = serial.train(serial.model(case.seed), serial.batches(case, samples(case), STEPS))
    return [trained["weights"]] * case.ranks


MODEL = list(serial.model(0).parameters())

EXERCISE = OnRanks(
    solution=accumulate,
    cases=(
        Case(2, 1, {"microbatches": 3}),
        Case(3, 2, {"microbatches": 2}),
        Case(2, 4, {"microbatches": 1}),
        Case(4, 3, {"microbatches": 4}),
    ),
    play=play,
    expected=expected,
    result="weights after 3 steps",
    budgets=(
        Budget("all-reduces in an optimizer step", lambda s: calls(Kind.ALL_REDUCE)(s) / STEPS, len(MODEL)),
        Budget("payload", payload, STEPS * sum(parameter.nbytes for parameter in MODEL), "bytes"),
        Budget(
            "peak of the activations of a rank", peak("activations"), 2 * serial.outputs(SAMPLES), "bytes"
        ),
    ),
    after="02-data-parallel",
    place=70,
    start="Two loops, one in the other: steps, and micro-batches of a step. Which of zero_grad, forward, backward, "
    "`average` and step belong into the inner loop, and which into the outer one?",
    mistakes=(
        Mistake(
            "a-sum-over-micro-batches",
            (
                "With one micro-batch a step it would be right. What happens to the gradient with m of them?",
                "Each loss is a mean over one micro-batch, and backward adds the gradients up. The sum of m means is "
                "m times the mean: divide each loss by m, the number of micro-batches.",
            ),
            [(" / len(microbatches)", "")],
        ),
        Mistake(
            "steps-after-each-micro-batch",
            (
                "How many optimizer steps does a list of micro-batches stand for?",
                "One. The micro-batches of a step are one batch, cut up for memory's sake: all their gradients "
                "first, then one step.",
            ),
            [
                (
                    "            loss.backward()\n        average(ctx, model)\n        optimizer.step()\n",
                    "            loss.backward()\n            average(ctx, model)\n            optimizer.step()\n"
                    "            optimizer.zero_grad()\n",
                )
            ],
        ),
        Mistake(
            "forgets-the-earlier-micro-batches",
            (
                "Which micro-batches have an influence on the step?",
                "`zero_grad` for each micro-batch throws away what the earlier ones have added: only the last one "
                "counts. Once a step, before the first.",
            ),
            [
                ("        optimizer.zero_grad()\n        for", "        for"),
                ("            loss = ", "            optimizer.zero_grad()\n            loss = "),
            ],
        ),
        Mistake(
            "gradients-pile-up",
            (
                "The first step is right. What is in `parameter.grad` when the second begins?",
                "backward adds to what is there, and that is wanted within a step only: `optimizer.zero_grad()` "
                "before each.",
            ),
            [("        optimizer.zero_grad()\n", "")],
        ),
        Mistake(
            "sends-before-the-last",
            (
                "Do all ranks end with the same weights? Which gradients were sent, and which came later?",
                "What a backward adds after the all-reduce is known to this rank alone. The all-reduce comes after "
                "the last micro-batch's backward.",
            ),
            [
                ("        average(ctx, model)\n", ""),
                (
                    "            loss.backward()\n",
                    "            if inputs is microbatches[-1][0] and len(microbatches) > 1:\n"
                    "                average(ctx, model)\n            loss.backward()\n",
                ),
            ],
        ),
        Mistake(
            "sends-every-time",
            (
                "The weights are right. How many all-reduces did you need in a step?",
                "An average after each micro-batch gives the same in the end (the mean of what is equal everywhere "
                "is itself), and sends m times as much. Put it after the inner loop.",
            ),
            [("        average(ctx, model)\n", "            average(ctx, model)\n")],
            when=lambda seen: "all-reduces" in seen.budget,
        ),
        Mistake(
            "one-backward-for-all",
            (
                "The weights are right. Which graphs exist when your backward begins, and what does each of them hold?",
                "A sum of losses keeps the graphs of all micro-batches, and so all their activations: as much memory "
                "as the whole share at once. A backward right after its forward frees them.",
            ),
            [
                (
                    "        for inputs, targets in",
                    "        total = torch.zeros((), dtype=torch.float64)\n        for inputs, targets in",
                ),
                (
                    "            loss.backward()\n",
                    "            total = total + loss\n        total.backward()\n",
                ),
            ],
            when=lambda seen: "peak" in seen.budget,
        ),
    ),
    otherwise=(
        "Take one rank, and two micro-batches of one sample each. By hand: which gradient has the mean over both, and "
        "what does your loop leave in `parameter.grad` before the step?",
    ),
)
