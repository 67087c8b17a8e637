"""Naive model parallelism.

The stages are on p ranks, one each, and one batch goes through: forward from rank 0 to the last, which computes the
loss, and backward all the way up again. Autograd ends where a rank ends, so you carry on for it:

    rank 0      forward ──── activations ───▶ rank 1      forward, loss
                backward ◀── gradient of  ───             backward
                             rank 1's input

Write it with `ctx.comm.send` and `ctx.comm.recv`. Afterwards each parameter's `.grad` has to be what serial training
would have put there. `tensor.backward(gradient)` goes on backward from a tensor whose gradient is known.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import messages
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.serial import mlp
from mpkit.course.framework.staged import record_stage


# %% answer
def naive_mp(ctx: mk.Context, stage: nn.Module, x: Tensor, y: Tensor) -> None:
    """Run the forward and backward of one batch; leave the gradients in `stage`'s parameters.

    stage: this rank's part of the model; takes and gives (batch, width).
    x: (batch, width): on rank 0 the inputs; elsewhere a buffer of the same shape and dtype, to receive into.
    y: (batch, width): on the last rank the targets of F.mse_loss; elsewhere a buffer, likewise.
    """
    ### BEGIN SOLUTION
    first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
    # forward
    if not first:
        x = ctx.comm.recv(x, ctx.rank - 1).requires_grad_()
    output = stage(x)
    # backward
    if last:
        F.mse_loss(output, y).backward()
    else:
        ctx.comm.send(output, ctx.rank + 1)
        output.backward(ctx.comm.recv(y, ctx.rank + 1))
    if not first:
        ctx.comm.send(x.grad, ctx.rank - 1)
    ### END SOLUTION


# %% checks
def batch(case: Case) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (5, 6) each."""
    x, y = torch.randn(2, 5, 6, generator=case.generator(), dtype=torch.float64)
    return x, y


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run one batch; return the gradients of this rank's stage."""
    assert callable(answer)
    stage = mlp(2 * case.ranks, case.seed)[2 * ctx.rank : 2 * ctx.rank + 2]
    x, y = batch(case)
    x = x if ctx.rank == 0 else torch.full_like(x, torch.nan)
    y = y if ctx.rank == ctx.world_size - 1 else torch.full_like(y, torch.nan)
    answer(ctx, record_stage(ctx, stage), x, y)
    return {name: parameter.grad for name, parameter in stage.named_parameters()}


def expected(case: Case) -> list[object]:
    """Return the gradients of serial training, by stage."""
    model = mlp(2 * case.ranks, case.seed)
    x, y = batch(case)
    F.mse_loss(model(x), y).backward()
    stages = [model[2 * rank : 2 * rank + 2] for rank in range(case.ranks)]
    return [{name: parameter.grad for name, parameter in stage.named_parameters()} for stage in stages]


EXERCISE = OnRanks(
    solution=naive_mp,
    cases=(Case(2, 1), Case(3, 2), Case(4, 3)),
    play=play,
    expected=expected,
    result="the gradients of the stage",
    budgets=(Budget("messages that a rank sends", messages, 2),),
    after="01-pipeline-bubbles",
    place=20,
    start="Write the forward first: who receives, who sends? A rank in the middle does both. Then ask what the rank "
    "before needs from you so that it can go backward.",
    mistakes=(
        Mistake(
            "input-without-a-gradient",
            (
                "What is the gradient of something that does not ask for one?",
                "What arrives by a message is a plain tensor: autograd computes gradients of the parameters, and "
                "none for it. But the rank before needs exactly that one.",
                "`x.requires_grad_()` after it is received, before `stage(x)`; then `x.grad` is there after the "
                "backward.",
            ),
            [(".requires_grad_()", "")],
            when=lambda seen: "NoneType" in seen.error,
        ),
        Mistake(
            "forgets-to-send-the-gradient",
            (
                "The report says who waits for a message that never comes. Which message is it, and who should send "
                "it?",
                "Each rank but the first owes the one before it the gradient of what it received from there.",
            ),
            [
                (
                    "    if not first:\n        ctx.comm.send(x.grad, ctx.rank - 1)\n",
                    "",
                )
            ],
            when=lambda seen: "never sent it" in seen.hang,
        ),
        Mistake(
            "backward-from-ones",
            (
                "What does a rank that is not the last know of the loss?",
                "The gradient of its output: the rank after it has computed that, and sends it. Begin the backward "
                "with it, not with ones.",
                "`output.backward(ctx.comm.recv(y, ctx.rank + 1))`",
            ),
            [
                (
                    "output.backward(ctx.comm.recv(y, ctx.rank + 1))",
                    "ctx.comm.recv(y, ctx.rank + 1)\n        output.sum().backward()",
                )
            ],
        ),
        Mistake(
            "passes-on-the-gradient-it-got",
            (
                "With 2 ranks all is right. What does a rank in the middle send back?",
                "What it received is the gradient of its *output*. The rank before wants that of its *input*: "
                "`x.grad`, which the backward through this stage makes.",
            ),
            [
                (
                    "output.backward(ctx.comm.recv(y, ctx.rank + 1))",
                    "output.backward(grad := ctx.comm.recv(y, ctx.rank + 1))",
                ),
                ("ctx.comm.send(x.grad,", "ctx.comm.send(x.grad if last else grad,"),
            ],
        ),
        Mistake(
            "backward-twice",
            (
                "The gradients are too large, by the same factor in all parameters of a stage. How often does its "
                "backward run?",
                "Gradients add up in `.grad`: a second backward adds to those of the first. One batch, one backward.",
            ),
            [
                (
                    "output.backward(ctx.comm.recv(y, ctx.rank + 1))",
                    "ctx.comm.recv(y, ctx.rank + 1)\n        output.backward(y, retain_graph=True)\n        "
                    "output.backward(y)",
                )
            ],
        ),
    ),
    otherwise=(
        "Follow the batch on paper with 3 ranks: which message comes next, from whom to whom, and what is in it?",
        "In order, on a rank in the middle: receive x, forward, send the output, receive its gradient, backward, "
        "send x.grad.",
    ),
)
