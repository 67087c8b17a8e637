"""Run a row of actions: 1F1B on ranks.

Your program for GPipe's rows has two faults that only 1F1B's rows show. Mend them.

*It hangs.* In the steady phase two neighbours send to each other at the same time, one an output down, the other a
gradient up:

    rank 0 | F0 F1 B0 F2 B1 ...         after F1 it sends an output to rank 1
    rank 1 |    F0 B0 F1 B1 F2 ...      after B0 it sends a gradient to rank 0

If both wait in `send` until the other receives, both wait for ever. `work = ctx.comm.isend(tensor, dst)` starts a send
and returns; the tensor must not change before `work.wait()`. Wait for every send before you return.

*It may keep too much.* The reason for 1F1B is that what a rank holds does not grow with m. Budget: for each of p
micro-batches what the forward keeps (L+1 tensors, with L layers per stage) and one tensor more, and 8 for the work that
is being done. Whatever a variable still refers to is held, and so is the tensor of a send that was not waited for.
When can you be sure that an output has arrived, so that `wait()` costs nothing?

The rest is as for GPipe: the loss is the mean over the m micro-batches, actions happen in the row's order, a message
per forward and per backward at most. The row may be any that finishes, GPipe's as well.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.2.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import rows
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, messages, peak
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.course.framework.staged import record_stage
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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run one step; return what this rank did, and the gradients of its stage."""
    assert callable(answer)
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
    start="Begin with your answer for GPipe's rows, and run the check: the report says which two ranks wait for each "
    "other. Which of the two messages could be started, and waited for later?",
    mistakes=(
        Mistake(
            "waits-in-every-send",
            (
                "Read the report: which two ranks are in `send` at the same time, and who is to receive?",
                "One sends an output down while the other sends a gradient up, and neither comes to its receive. "
                "Start the sends with `isend`, go on, and wait for them later.",
                "`outputs[i] = ctx.comm.isend(...)` in F, and likewise in B; `wait()` for the works later.",
            ),
            [
                ("outputs[i] = ctx.comm.isend(", "ctx.comm.send("),
                ("                outputs.pop(i).wait()  # the next rank has used it\n", ""),
                (
                    "gradients.append(ctx.comm.isend(x.grad, ctx.rank - 1))",
                    "ctx.comm.send(x.grad, ctx.rank - 1)",
                ),
            ],
            when=lambda seen: seen.hang and "never sent" not in seen.hang,
        ),
        Mistake(
            "waits-for-all-sends-at-the-end",
            (
                "The gradients are right, and memory grows with m. Who still holds an output whose gradient is here?",
                "A send that nobody has waited for keeps its tensor. When the gradient of micro-batch i's output "
                "arrives, the output must have arrived before: wait for its send then, and let it go.",
                "Keep the works by micro-batch: `outputs.pop(i).wait()` after the gradient is received; and before "
                "you send a gradient wait for the send of the one before.",
            ),
            [
                ("                outputs.pop(i).wait()  # the next rank has used it\n", ""),
                ("                while gradients:\n", ""),
                ("                    gradients.pop().wait()  # the one before\n", ""),
                ("    for work in gradients:", "    for work in [*outputs.values(), *gradients]:"),
            ],
            when=lambda seen: seen.budget == HELD and waits_last(seen),
        ),
        Mistake(
            "never-waits",
            (
                "The gradients are right. How do you know that a message has left before you return?",
                "`isend` only starts it. Until `wait()` returns its tensor must not change, and nobody says whether it "
                "arrived. Keep what `isend` returns, and wait for each.",
                "`outputs.pop(i).wait()` when the gradient is here, and a loop over the rest at the end.",
            ),
            [("outputs.pop(i).wait()", "outputs.pop(i)")],
            when=lambda seen: seen.budget == LEFT_ALONE,
        ),
        Mistake(
            "keeps-what-is-done",
            (
                "The gradients are right. After its backward, who still refers to a micro-batch's input and output?",
                "A tensor that is still in a dict, a list or a variable is held, and an input holds its gradient. "
                "With 16 micro-batches that is 16 of each.",
                "Take them out where the backward uses them: `x, output = held.pop(i)`.",
            ),
            [("x, output = held.pop(i)", "x, output = held[i]")],
            when=lambda seen: seen.budget == HELD,
        ),
        Mistake(
            "one-buffer-for-all-inputs",
            (
                "Where does micro-batch 1 arrive, and what was there before?",
                "The backward of micro-batch 0 still needs its input. Received into the same buffer, the next one "
                "overwrites it, and autograd computes with the wrong numbers, or notices that they have changed.",
                "A buffer of its own for each: `torch.empty_like(like)` in F.",
            ),
            [
                (
                    "x = inputs[i] if first else ctx.comm.recv(torch.empty_like(like), ctx.rank - 1)\n"
                    "            x.requires_grad_(not first)",
                    "x = inputs[i] if first else ctx.comm.recv(like, ctx.rank - 1).detach().requires_grad_()",
                )
            ],
        ),
        Mistake(
            "summed-not-averaged",
            (
                "By which factor are the gradients too large? It is the same one in all parameters.",
                "The loss is the mean over the micro-batches: each counts 1/m of it.",
            ),
            [("targets[i]) / m", "targets[i])")],
        ),
        Mistake(
            "takes-the-newest",
            (
                "Rank 0 has two micro-batches on the way when its first backward comes. Whose is it?",
                "B's number says which: the *oldest* in 1F1B, not the one whose forward came last.",
                "Look up what was kept under `int(action[1:])`.",
            ),
            [("held.pop(i)", "held.pop(max(held))")],
        ),
        Mistake(
            "no-gradient-of-the-first-stages",
            (
                "The report says who waits for a message that never comes. Is it an output, or a gradient?",
                "Each backward of each rank but the first ends with a message to the rank before: the gradient of its "
                "input.",
            ),
            [("gradients.append(ctx.comm.isend(x.grad, ctx.rank - 1))", "pass")],
            when=lambda seen: "never sent" in seen.hang,
        ),
    ),
    otherwise=(
        "Run GPipe's rows with it first; if those are right, what differs is who is where when: print each action.",
    ),
)
