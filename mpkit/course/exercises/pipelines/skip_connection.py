"""A skip connection."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import messages, sent_bytes
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.own_stages import record_stage
from mpkit.course.framework.serial import mlp


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


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run one batch; return the gradients of this rank's stage."""
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
    when={
        "through-the-ranks-between": lambda seen: "messages" in seen.budget,
        "gradient-of-the-skip-first": lambda seen: "never received it" in seen.hang and "S0" in seen.hang,
        "skip-is-never-sent": lambda seen: "never sent it" in seen.hang,
    },
)
