"""Run a row of actions: GPipe on ranks.

So far the kit has run your schedules. Now write what runs them: each rank is given its row, such as
`["F0", "F1", "F2", "B2", "B1", "B0"]`, and does its actions in that order.

    F i    get micro-batch i's input (rank 0 has it, all others receive it), run the stage, send the output on
    B i    get the gradient of micro-batch i's output (the last rank makes it from the loss, all others receive it),
           go backward through the stage, send the gradient of the input back

All forwards come first, as in GPipe. The backwards come in any order, the same on every rank: keep what each will need
under its micro-batch's number.

The loss of the step is the *mean* over its m micro-batches, each `F.mse_loss`. Each parameter's `.grad` ends up as
serial training on all micro-batches at once would leave it. Each action happens once, in the row's order.

Budget: a message per forward and one per backward at most, and no collectives.

Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import rows
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, messages
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.course.framework.staged import record_stage


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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run one step; return what this rank did, and the gradients of its stage."""
    assert callable(answer)
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
    start="Split each action into its kind and its number: `kind, i = action[0], int(action[1:])`. Write F for rank 0 "
    "and for the others, and put the input and the output into a dict, under i. Then B, which takes them out again.",
    mistakes=(
        Mistake(
            "input-without-a-gradient",
            (
                "What is the gradient of something that does not ask for one?",
                "What arrives by a message is a plain tensor, and the rank before needs its gradient.",
                "`x.requires_grad_()` after it is received, before `stage(x)`.",
            ),
            [("            x.requires_grad_(not first)\n", "")],
            when=lambda seen: "NoneType" in seen.error,
        ),
        Mistake(
            "gradients-are-not-sent",
            (
                "The report says who waits for a message that never comes. Is it an output, or a gradient?",
                "Each backward of each rank but the first ends with a message: the gradient of the input, to the rank "
                "before.",
            ),
            [("            if not first:\n                ctx.comm.send(x.grad, ctx.rank - 1)\n", "")],
            when=lambda seen: "never sent it" in seen.hang,
        ),
        Mistake(
            "keeps-one-micro-batch-only",
            (
                "With one micro-batch all is right. What is left of the first when the second's forward is done?",
                "All forwards come before any backward: input and output of each micro-batch have to be kept until "
                "its own backward, so in a dict or list, not in one variable.",
                "`held[i] = x, output` in F, and `x, output = held.pop(i)` in B.",
            ),
            [("held[i] = x, output", "held[0] = x, output"), ("held.pop(i)", "held[0]")],
            when=lambda seen: "second time" in seen.error,
        ),
        Mistake(
            "takes-the-oldest",
            (
                "In the case that fails the backwards do not come in the order of the forwards. Which micro-batch is "
                "yours for?",
                "B's number says whose backward it is. Taken in the order of the forwards, an output meets another "
                "micro-batch's gradient.",
                "Look up what was kept under `int(action[1:])`.",
            ),
            [("held.pop(i)", "held.pop(min(held))")],
        ),
        Mistake(
            "ignores-the-row",
            (
                "The gradients are right. Compare the actions that were done with those of the row: where do they "
                "differ?",
                "You do all forwards, and then the backwards in an order of your own. Whoever wrote the row had a "
                "reason: take one action after the other from it.",
                "`for action in row:`, and nothing else decides what comes next.",
            ),
            [
                (
                    "    for action in row:\n",
                    '    for action in sorted(row, key=lambda each: (each[0] == "B", each)):\n',
                )
            ],
            when=disobeys,
        ),
        Mistake(
            "summed-not-averaged",
            (
                "By which factor are the gradients too large? It is the same one in all parameters.",
                "The loss is the mean over the micro-batches: each counts 1/m of it.",
                "`F.mse_loss(output, targets[i]) / m`",
            ),
            [("targets[i]) / m", "targets[i])")],
        ),
        Mistake(
            "passes-on-the-gradient-it-got",
            (
                "With 2 ranks all is right. What does a rank in the middle send back?",
                "It received the gradient of its *output*. The rank before wants that of its *input*, `x.grad`, which "
                "this stage's backward makes.",
            ),
            [("ctx.comm.send(x.grad,", "ctx.comm.send(x.grad if last else gradient,")],
        ),
        Mistake(
            "backward-from-ones",
            (
                "What does a rank that is not the last know of the loss?",
                "Only the gradient that it receives. The backward begins with it, not with ones.",
                "`output.backward(gradient)`",
            ),
            [("output.backward(gradient)", "output.sum().backward()")],
        ),
    ),
    otherwise=(
        "Take one micro-batch on 3 ranks first: receive, forward, send, receive the gradient, backward, send.",
        "If one micro-batch is right and two are not, print each action with the first number of its input.",
    ),
)
