"""A skip connection.

Stage after stage, each takes what the one before it made. But here the last stage also wants what the *first* one
made, as in a U-Net, or a decoder that looks at the encoder's output. That value skips the stages between, so it has to
be sent as well, and its gradient has to come back:

    rank 0 ────▶ rank 1 ────▶ rank 2 ────▶ rank 3          stage 3 is called as stage(x, skip)
       └───────────────── skip ───────────────▲

Send it straight there: not through the ranks between, which have no use for it. Nobody promises that a message waits
somewhere on its way, so the order of sends and receives matters. Gradients of a tensor that is used twice add up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import messages, sent_bytes
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.serial import mlp
from mpkit.course.framework.staged import record_stage


# %% answer
def skip_connection(ctx: mk.Context, stage: nn.Module, x: Tensor, y: Tensor) -> None:
    """Run the forward and backward of one batch, with a skip from rank 0 to the last; leave the gradients in `stage`.

    stage: this rank's part of the model, stage(x); on the last rank stage(x, skip).
    x: (batch, width): on rank 0 the inputs; elsewhere a buffer of the shape and dtype of all that is sent.
    y: (batch, width): on the last rank the targets of F.mse_loss; elsewhere a buffer, likewise.
    """
    last = ctx.world_size - 1
    ### BEGIN SOLUTION
    if ctx.rank == 0:
        output = stage(x)
        ctx.comm.send(output, 1)
        ctx.comm.send(output, last, "S0")
        grad = ctx.comm.recv(torch.empty_like(y), 1)
        skip_grad = ctx.comm.recv(torch.empty_like(y), last, "S0")
        output.backward(grad + skip_grad)
        return
    x = ctx.comm.recv(x, ctx.rank - 1).requires_grad_()
    if ctx.rank < last:
        output = stage(x)
        ctx.comm.send(output, ctx.rank + 1)
        output.backward(ctx.comm.recv(torch.empty_like(y), ctx.rank + 1))
        ctx.comm.send(x.grad, ctx.rank - 1)
    else:
        skip = ctx.comm.recv(torch.empty_like(y), 0, "S0").requires_grad_()
        F.mse_loss(stage(x, skip), y).backward()
        ctx.comm.send(x.grad, ctx.rank - 1)
        ctx.comm.send(skip.grad, 0, "S0")
    ### END SOLUTION


# %% checks
class Joined(nn.Module):
    """The last stage: the previous stage's output, times a gate computed from the skip."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Return the output, (batch, width), (batch, width) -> (batch, width)."""
        made: Tensor = self.layer(x) * torch.sigmoid(skip)
        return made + 0.5 * skip


def batch(case: Case) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (4, 6) each."""
    x, y = torch.randn(2, 4, 6, generator=case.generator(), dtype=torch.float64)
    return x, y


def stages(case: Case) -> list[nn.Module]:
    """Return one stage per rank."""
    layers = list(mlp(case.ranks, case.seed))
    return [*layers[:-1], Joined(layers[-1])]


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run one batch; return the gradients of this rank's stage."""
    assert callable(answer)
    stage = stages(case)[ctx.rank]
    x, y = batch(case)
    x = x if ctx.rank == 0 else torch.full_like(x, torch.nan)
    y = y if ctx.rank == ctx.world_size - 1 else torch.full_like(y, torch.nan)
    answer(ctx, record_stage(ctx, stage), x, y)
    return {name: parameter.grad for name, parameter in stage.named_parameters()}


def expected(case: Case) -> list[object]:
    """Return the gradients of serial training, by stage."""
    first, *between, last = parts = stages(case)
    x, y = batch(case)
    skip = first(x)
    F.mse_loss(last(nn.Sequential(*between)(skip), skip), y).backward()
    return [{name: parameter.grad for name, parameter in stage.named_parameters()} for stage in parts]


EXERCISE = OnRanks(
    solution=skip_connection,
    cases=(Case(3, 1), Case(4, 2)),
    play=play,
    expected=expected,
    result="the gradients of the stage",
    budgets=(
        Budget("messages that a rank sends", messages, 2),
        Budget("bytes of messages that a rank sends", sent_bytes, 2 * 4 * 6 * 8, "bytes"),
    ),
    after="05-real-models",
    place=120,
    start="Begin with your naive MP. Rank 0 sends its output to two ranks now, and the last one receives two "
    'tensors. A tag such as "S0" tells the two kinds of messages apart. What does rank 0 need before it can go '
    "backward?",
    mistakes=(
        Mistake(
            "through-the-ranks-between",
            (
                "It is right. How many messages does a rank in the middle send, and what are half of them for?",
                "The ranks between neither use the skip nor its gradient. Ranks 0 and p-1 can send to each other "
                "straight: any two ranks can.",
            ),
            """
            def skip_connection(ctx: mk.Context, stage: nn.Module, x: Tensor, y: Tensor) -> None:
                last, buffer = ctx.world_size - 1, torch.empty_like(y)
                if ctx.rank:
                    x = ctx.comm.recv(x, ctx.rank - 1).requires_grad_()
                    skip = ctx.comm.recv(torch.empty_like(x), ctx.rank - 1).requires_grad_()
                output = stage(x, skip) if ctx.rank == last else stage(x)
                if ctx.rank < last:
                    ctx.comm.send(output, ctx.rank + 1)
                    ctx.comm.send(skip if ctx.rank else output, ctx.rank + 1)
                    grad = ctx.comm.recv(buffer, ctx.rank + 1)
                    of_skip = ctx.comm.recv(torch.empty_like(grad), ctx.rank + 1)
                    output.backward(grad if ctx.rank else grad + of_skip)
                else:
                    F.mse_loss(output, y).backward()
                    of_skip = skip.grad
                if ctx.rank:
                    ctx.comm.send(x.grad, ctx.rank - 1)
                    ctx.comm.send(of_skip, ctx.rank - 1)
            """,
            when=lambda seen: "messages" in seen.budget,
        ),
        Mistake(
            "skip-without-a-gradient",
            (
                "Which rank's gradients are wrong? Through which two ways does the loss depend on that stage?",
                "Rank 0's output is used twice, so its gradient is a sum of two: one comes back through the stages, "
                "the other straight from the last rank. Yours has only the first.",
                "The last rank sends `skip.grad` to rank 0, which adds it to the gradient that comes from rank 1.",
            ),
            [
                (
                    '        skip_grad = ctx.comm.recv(torch.empty_like(y), last, "S0")\n',
                    "",
                ),
                ("grad + skip_grad", "grad"),
                ('        ctx.comm.send(skip.grad, 0, "S0")\n', ""),
            ],
        ),
        Mistake(
            "one-gradient-instead-of-the-other",
            (
                "Rank 0 has two gradients of one tensor. What have you done with the first?",
                "The two have to be added: receiving both into one buffer, or going backward from the last only, "
                "loses one.",
                "`output.backward(grad + skip_grad)`",
            ),
            [("grad + skip_grad", "skip_grad")],
        ),
        Mistake(
            "gradient-of-the-skip-first",
            (
                "The report shows a ring of ranks that wait. Whose send could go through first?",
                "The last rank waits for rank 0 to receive the skip's gradient. Rank 0 waits for rank 1, which waits "
                "for the rank after it, and so on: for the last rank.",
                "The last rank sends `x.grad` first, and `skip.grad` after it. Or rank 0 receives in the other order.",
            ),
            [
                (
                    '        ctx.comm.send(x.grad, ctx.rank - 1)\n        ctx.comm.send(skip.grad, 0, "S0")\n',
                    '        ctx.comm.send(skip.grad, 0, "S0")\n        ctx.comm.send(x.grad, ctx.rank - 1)\n',
                )
            ],
            when=lambda seen: "never received it" in seen.hang and "S0" in seen.hang,
        ),
        Mistake(
            "skip-is-never-sent",
            (
                "Which message does the last rank wait for?",
                "The skip's value lives on rank 0 only. It has to be sent to the last rank, besides what goes to "
                "rank 1.",
            ),
            [('        ctx.comm.send(output, last, "S0")\n', "")],
            when=lambda seen: "never sent it" in seen.hang,
        ),
    ),
    otherwise=(
        "Write down all messages with 3 ranks: two forward from rank 0, one from rank 1, and for each of them one "
        "back.",
    ),
)
