"""Run a row of actions: GPipe on ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import rows
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import collectives, messages
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.own_stages import record_stage


# %% answer
def run_gpipe(
    ctx: mk.Context,
    stage: nn.Module,
    row: list[str],
    inputs: list[Tensor],
    targets: list[Tensor],
    like: Tensor,
) -> None:
    """Run this rank's row of a pipeline step; leave the gradients in the parameters of `stage`.

    stage: this rank's part of the model; takes and gives (samples, width).
    row: this rank's actions, such as ["F0", "F1", "B1", "B0"].
    inputs: on rank 0, the input of each micro-batch; empty elsewhere.
    targets: on the last rank, the targets of each micro-batch; empty elsewhere.
    like: a tensor of a message's shape and dtype: `torch.empty_like(like)` makes a buffer to receive into.
    """
    first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
    m = len(row) // 2
    ### BEGIN SOLUTION
    held: dict[int, tuple[Tensor, Tensor]] = {}
    for action in row:
        kind, i = action[0], int(action[1:])
        if kind == "F":
            x = inputs[i] if first else ctx.comm.recv(torch.empty_like(like), ctx.rank - 1)
            x.requires_grad_(not first)
            output = stage(x)
            held[i] = x, output
            if not last:
                ctx.comm.send(output.detach(), ctx.rank + 1)
        else:
            x, output = held.pop(i)
            if last:
                loss = F.mse_loss(output, targets[i]) / m
                loss.backward()
            else:
                gradient = ctx.comm.recv(torch.empty_like(like), ctx.rank + 1)
                output.backward(gradient)
            if not first:
                ctx.comm.send(x.grad, ctx.rank - 1)
    ### END SOLUTION


# %% checks
def row_of(case: Case) -> list[str]:
    """Return the row of every rank: all forwards, and the backwards in the case's order."""
    order = list(range(case["microbatches"]))
    backwards = {"forward": order, "reversed": order[::-1], "mixed": order[1::2] + order[::2]}[
        case["backwards"]
    ]
    return [f"F{i}" for i in order] + [f"B{i}" for i in backwards]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run one step; return what this rank did, and the gradients of its stage."""
    stage, (xs, ys), row = rows.stages(case)[ctx.rank], rows.batches(case), row_of(case)
    done, like = rows.observe(record_stage(ctx, stage), row), torch.full_like(xs[0], torch.nan)
    first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
    answer(ctx, stage, list(row), xs if first else [], ys if last else [], like)
    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    return {"gradients": gradients, "actions": " ".join(done)}


def expected(case: Case) -> list[object]:
    """Return the row, and the gradients of serial training, by stage."""
    return [{"gradients": each, "actions": " ".join(row_of(case))} for each in rows.serial(case)]


def disobeys(seen: Seen) -> bool:
    """Return whether some rank's gradients are right, and its actions are not the row's."""
    return seen.got is not None and any(got["actions"] != " ".join(row_of(seen.case)) for got in seen.got)


EXERCISE = OnRanks(
    solution=run_gpipe,
    cases=(
        Case(2, 1, {"microbatches": 1, "backwards": "forward"}),
        Case(2, 2, {"microbatches": 3, "backwards": "forward"}),
        Case(3, 3, {"microbatches": 4, "backwards": "reversed"}),
        Case(4, 4, {"microbatches": 5, "backwards": "mixed"}),
    ),
    play=play,
    expected=expected,
    result="the gradients of the stage, and the order of its actions",
    budgets=(
        Budget("messages that a rank sends", messages, lambda case: 2 * case["microbatches"]),
        Budget("collectives", collectives, 0),
    ),
    after="01-pipeline-bubbles",
    place=45,
    when={
        "input-without-a-gradient": lambda seen: "NoneType" in seen.error,
        "gradients-are-not-sent": lambda seen: "never sent it" in seen.hang,
        "keeps-one-micro-batch-only": lambda seen: "second time" in seen.error,
        "ignores-the-row": disobeys,
    },
)
