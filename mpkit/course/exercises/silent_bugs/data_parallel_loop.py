"""Silent bug 1: a data-parallel loop.

A loop as in the exercise on naive DDP: every rank takes its share of each batch, and the gradients are all-reduced.
It runs, and the loss falls, at first even faster than with one device. "Data parallelism converges better", somebody
has written into the minutes.

It should be the same training as on one device with the whole batch. `mk.compare("data-parallel-loop", train)`, in
a cell of its own, shows what it is: in each step the loss of serial training and yours, which weights differ after
it, and how far those have moved, as a multiple of how far they should have. Where the first loss is right and the
second is not, forward and loss are right, and the first *step* was not.

Find the bug, and mend it. The optimizer is SGD with momentum and weight decay, so that not everything that looks
equivalent is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.measures import collectives
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen


# %% answer
def train(ctx: mk.Context, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train for one step per batch; return the losses. `batches` are whole ones, (B, 6) and (B, 3), on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for inputs, targets in batches:
        mine = slice(ctx.rank, None, ctx.world_size)
        loss = F.mse_loss(model(inputs[mine]), targets[mine])
        optimizer.zero_grad()
        loss.backward()
        ### BEGIN SOLUTION
        # instead: for parameter in model.parameters():
        # instead:     ctx.comm.all_reduce(parameter.grad)
        for parameter in model.parameters():
            ctx.comm.all_reduce(parameter.grad, op="mean")
        ### END SOLUTION
        optimizer.step()
        losses.append(ctx.comm.all_reduce(loss.detach(), op="mean").item())
    return losses


# %% checks
SAMPLES = 48


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the losses and the weights of the answer."""
    assert callable(answer)
    model = serial.model(case.seed)
    return serial.outcome(answer(ctx, model, serial.batches(case, SAMPLES, case["steps"])), model)


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives."""
    return [serial.train(serial.model(case.seed), serial.batches(case, SAMPLES, case["steps"]))] * case.ranks


def more_than_gradients(seen: Seen) -> bool:
    """Return whether something besides gradients and losses was sent."""
    each = 1 + len(list(serial.model(0).parameters()))
    return collectives(seen) > each * seen.case["steps"]


EXERCISE = OnRanks(
    solution=train,
    cases=(Case(2, 1, {"steps": 4}), Case(3, 2, {"steps": 4}), Case(4, 3, {"steps": 5})),
    play=play,
    expected=expected,
    result="losses and weights",
    after="02-data-parallel",
    place=10,
    start="Run the program as it is, with `mk.compare`. In which step do the losses part for the first "
    "time, and which weights differ after the step before it?",
    mistakes=(
        Mistake(
            "weights-averaged",
            (
                "All ranks have the same weights, and the gradients are still wrong. Which of the two did you mend?",
                "The weights were equal on all ranks before: averaging or broadcasting what is equal changes "
                "nothing. All ranks take the same wrong step.",
            ),
            [
                ('parameter.grad, op="mean")', "parameter.grad)"),
                (
                    "        optimizer.step()\n",
                    "        optimizer.step()\n        for parameter in model.parameters():\n"
                    '            ctx.comm.all_reduce(parameter.data, op="mean")\n',
                ),
            ],
            when=more_than_gradients,
        ),
        Mistake(
            "still-summed",
            (
                "The first loss is that of serial training, the weights after the first step are not. So the step "
                "was wrong: the gradient, or what the optimizer made of it. Print one gradient on one device, and on "
                "two ranks.",
                "The gradient is as many times too large as there are ranks. Each rank's loss is already a mean over "
                "its share; what has to come out of the all-reduce is not the sum of the ranks' gradients.",
                "Divide each gradient by `ctx.world_size` after the all-reduce, or ask for `op='mean'`.",
            ),
            [('parameter.grad, op="mean")', "parameter.grad)")],
        ),
        Mistake(
            "learning-rate-divided",
            (
                "The weights are nearer now, but not equal. What else does the learning rate multiply, besides the "
                "gradient?",
                "Weight decay: it does not depend on the number of ranks, and with a smaller rate it is smaller too. "
                "(So would be clipping, and Adam would not care at all.) It is the gradient that is wrong: mend that.",
            ),
            [('parameter.grad, op="mean")', "parameter.grad)"), ("lr=0.1,", "lr=0.1 / ctx.world_size,")],
        ),
        Mistake(
            "averaged-twice",
            (
                "Now the loss falls too slowly. How often do you divide by the number of ranks?",
                "Divide the loss by the number of ranks and sum, or average the gradients: either is right, both "
                "together are too small by that factor.",
            ),
            [
                ("    loss.backward()", "    (loss / ctx.world_size).backward()"),
            ],
        ),
        Mistake(
            "never-sent",
            (
                "Do the ranks still agree on their weights after a step? Compare the last column with 2 ranks and "
                "with 3.",
                "Without any all-reduce each rank trains on its share alone. The sum was too much, and nothing is "
                "too little.",
            ),
            [('            ctx.comm.all_reduce(parameter.grad, op="mean")', "            pass")],
        ),
    ),
    otherwise=(
        "`mk.compare` shows the first step after which a weight differs. Everything before that step is "
        "right. Print what goes into it: the gradients, on every rank and on one device.",
    ),
)
