"""Run a row of actions: 1F1B on ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import rows
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import collectives, messages, peak
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.own_stages import record_stage
from mpkit.plan.schedule import gpipe, one_f_one_b
from mpkit.trace import Kind


# %% answer
def run_1f1b(
    ctx: mk.Context,
    stage: nn.Module,
    row: list[str],
    inputs: list[Tensor],
    targets: list[Tensor],
    like: Tensor,
) -> None:
    """Run this rank's row of a pipeline step; leave the gradients in the parameters of `stage`.

    stage: this rank's part of the model; takes and gives (samples, width).
    row: this rank's actions, such as ["F0", "F1", "B0", "F2", "B1", "B2"].
    inputs: on rank 0, the input of each micro-batch; empty elsewhere.
    targets: on the last rank, the targets of each micro-batch; empty elsewhere.
    like: a tensor of a message's shape and dtype: `torch.empty_like(like)` makes a buffer to receive into.
    """
    first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
    m = len(row) // 2
    ### BEGIN SOLUTION
    held: dict[int, tuple[Tensor, Tensor]] = {}
    outputs: dict[int, Any] = {}  # the sends of outputs that are under way
    gradients: list[Any] = []  # of gradients
    for action in row:
        kind, i = action[0], int(action[1:])
        if kind == "F":
            x = inputs[i] if first else ctx.comm.recv(torch.empty_like(like), ctx.rank - 1)
            x.requires_grad_(not first)
            output = stage(x)
            held[i] = x, output
            if not last:
                outputs[i] = ctx.comm.isend(output.detach(), ctx.rank + 1)
        else:
            x, output = held.pop(i)
            if last:
                loss = F.mse_loss(output, targets[i]) / m
                loss.backward()
            else:
                gradient = ctx.comm.recv(torch.empty_like(like), ctx.rank + 1)
                outputs.pop(i).wait()  # the next rank has used it
                output.backward(gradient)
                del gradient
            if not first:
                while gradients:
                    gradients.pop().wait()  # the one before
                gradients.append(ctx.comm.isend(x.grad, ctx.rank - 1))
        del x, output
    for work in gradients:
        work.wait()
    ### END SOLUTION


# %% checks
HELD, LEFT_ALONE = "peak of the activations of a rank", "sends that a rank never waits for"


def rows_of(case: Case) -> list[list[str]]:
    """Return a row for each rank, in text: F0, B0."""
    build = gpipe if case["schedule"] == "gpipe" else one_f_one_b
    schedule = build(case.ranks, case["microbatches"])
    return [[f"{action.kind}{action.microbatch}" for action in row] for row in schedule.rows]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run one step; return what this rank did, and the gradients of its stage."""
    stage, (xs, ys), row = rows.stages(case)[ctx.rank], rows.batches(case), rows_of(case)[ctx.rank]
    done, like = rows.observe(record_stage(ctx, stage), row), torch.full_like(xs[0], torch.nan)
    first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
    with Memory(ctx, stage.parameters()):
        answer(ctx, stage, list(row), xs if first else [], ys if last else [], like)
    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    return {"gradients": gradients, "actions": " ".join(done)}


def expected(case: Case) -> list[object]:
    """Return each rank's row, and the gradients of serial training, by stage."""
    return [
        {"gradients": each, "actions": " ".join(row)}
        for each, row in zip(rows.serial(case), rows_of(case), strict=True)
    ]


def enough(case: Case) -> float:
    """Return the bytes of the activations of p micro-batches (of all m in GPipe), and of what the text adds."""
    live = case["microbatches"] if case["schedule"] == "gpipe" else min(case.ranks, case["microbatches"])
    return float((live * (rows.LAYERS + 2) + 8) * rows.UNIT)


def left_alone(seen: Seen) -> float:
    """Return how many sends nobody waited for, on the rank that has most of them."""
    assert seen.trace is not None
    most = 0
    for rank in seen.trace.ranks:
        waited = {int(op["ref"]) for op in rank.ops if op["kind"] == Kind.WAIT}
        sends = [at for at, op in enumerate(rank.ops) if op["kind"] == Kind.SEND]
        most = max(most, sum(at not in waited for at in sends))
    return float(most)


def waits_last(seen: Seen) -> bool:
    """Return whether rank 0 waited for no send before its last backward."""
    assert seen.trace is not None
    ops = seen.trace.ranks[0].ops
    last = max(at for at, op in enumerate(ops) if op["kind"] == Kind.BACKWARD)
    waits = [op for op in ops[:last] if op["kind"] == Kind.WAIT]
    return not any(ops[int(op["ref"])]["kind"] == Kind.SEND for op in waits)


EXERCISE = OnRanks(
    solution=run_1f1b,
    cases=(
        Case(2, 1, {"schedule": "gpipe", "microbatches": 2}),
        Case(2, 2, {"schedule": "1f1b", "microbatches": 16}),
        Case(4, 4, {"schedule": "1f1b", "microbatches": 6}),
    ),
    play=play,
    expected=expected,
    result="the gradients of the stage, and the order of its actions",
    budgets=(
        Budget(HELD, peak("activations"), enough, "bytes"),
        Budget(LEFT_ALONE, left_alone, 0),
        Budget("messages that a rank sends", messages, lambda case: 2 * case["microbatches"]),
        Budget("collectives", collectives, 0),
    ),
    after="04-schedules",
    place=55,
    when={
        "waits-in-every-send": lambda seen: seen.hang and "never sent" not in seen.hang,
        "waits-for-all-sends-at-the-end": lambda seen: seen.budget == HELD and waits_last(seen),
        "never-waits": lambda seen: seen.budget == LEFT_ALONE,
        "keeps-what-is-done": lambda seen: seen.budget == HELD,
        "no-gradient-of-the-first-stages": lambda seen: "never sent" in seen.hang,
    },
)
