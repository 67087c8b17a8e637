"""The five exchanges of DP.

`torch.nn.DataParallel` (DP) keeps everything on one device: rank 0 has the model, the batch and the optimizer. The
others have nothing but their processor. For every batch there are five exchanges, all with rank 0 on one end:

    scatter     rank 0 deals the inputs out                 each rank gets its share
    broadcast   rank 0 lends its parameters to all          ... and computes the outputs of its share
    gather      the outputs go to rank 0                    ... which computes the loss, and its gradient for them
    scatter     rank 0 deals that gradient out              ... each rank does the backward of its share
    reduce      the gradients are summed on rank 0          ... which takes the step

Write the step up to the gradients: afterwards rank 0 has the gradient of the whole batch in `parameter.grad`; it alone
has an optimizer. It returns the loss; what the others return does not matter. On ranks other than 0 the parameters,
the inputs and the targets hold garbage (but have the right shapes).

`ctx.comm` has `scatter(whole)`, `broadcast(tensor)` (in place), `gather(part)` and `reduce(tensor)`; each takes rank 0
as the root. `scatter` and `gather` return what arrived: `gather` an empty tensor on the others. Communication knows
nothing of autograd: what arrives has no history. `outputs.backward(gradient)` goes on from a gradient that you have.

Source: the documentation of torch.nn.DataParallel; the words are those of the kit's
`mpkit/strategies/nn_dataparallel/dp.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import calls
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.trace import Kind


# %% answer
def five_exchanges(ctx: mk.Context, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor | None:
    """Run one step of DP, up to the gradients on rank 0. Return the loss there.

    inputs: (B, 6), targets: (B, 3), of which only rank 0's are real; B is a multiple of ctx.world_size.
    """
    ### BEGIN SOLUTION
    loss = None
    # ---- scatter the inputs
    mine = ctx.comm.scatter(inputs)
    # ---- lend the parameters
    for parameter in model.parameters():
        ctx.comm.broadcast(parameter)
    outputs = model(mine)
    # ---- gather the outputs
    whole = ctx.comm.gather(outputs)
    gradient = torch.empty(len(inputs), outputs.shape[1], dtype=outputs.dtype)
    if ctx.rank == 0:
        whole.requires_grad_()
        loss = F.mse_loss(whole, targets)
        (gradient,) = torch.autograd.grad(loss, whole)
    # ---- scatter their gradients
    outputs.backward(ctx.comm.scatter(gradient))
    # ---- reduce the gradients
    for parameter in model.parameters():
        parameter.grad = ctx.comm.reduce(parameter.grad)
    return loss
    ### END SOLUTION


# %% checks
STEPS = 3


def batches(case: Case) -> list[serial.Batch]:
    """Return the whole batch of each step: six samples for each rank."""
    return serial.batches(case, 6 * case.ranks, STEPS)


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run some steps with the answer; rank 0 has the optimizer."""
    assert callable(answer)
    model = serial.model(case.seed)
    optimizer = serial.sgd(model)
    losses = []
    for x, y in batches(case):
        optimizer.zero_grad()
        if ctx.rank != 0:
            x, y = torch.full_like(x, 7.0), torch.full_like(y, 7.0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.5)
        loss = answer(ctx, model, x, y)
        if ctx.rank == 0:
            losses.append(loss)
            optimizer.step()
    return serial.outcome(losses, model) if ctx.rank == 0 else None


def expected(case: Case) -> list[object]:
    """Return what serial training gives on rank 0, and None on the others."""
    data = batches(case)
    return [serial.train(serial.model(case.seed), data)] + [None] * (case.ranks - 1)


def others(seen: Seen) -> float:
    """Count the collectives that are none of DP's five."""
    return sum(calls(kind)(seen) for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER))


PARAMETERS = len(list(serial.model(0).parameters()))

EXERCISE = OnRanks(
    solution=five_exchanges,
    cases=(Case(2, seed=1), Case(3, seed=2), Case(4, seed=3)),
    play=play,
    expected=expected,
    result="losses and weights of rank 0",
    budgets=(
        Budget("scatters", calls(Kind.SCATTER), 2 * STEPS),
        Budget("gathers", calls(Kind.GATHER), STEPS),
        Budget("broadcasts", calls(Kind.BROADCAST), PARAMETERS * STEPS),
        Budget("reduces", calls(Kind.REDUCE), PARAMETERS * STEPS),
        Budget("collectives that are not DP's", others, 0),
    ),
    after="02-data-parallel",
    place=20,
    start="Write the five exchanges as five comments first. The first is `mine = ctx.comm.scatter(inputs)`; every "
    "rank calls it, also those whose inputs are garbage. Which of the steps between the exchanges does rank 0 do "
    "alone?",
    mistakes=(
        Mistake(
            "never-lends-the-parameters",
            (
                "With which weights do the other ranks compute their outputs?",
                "The others' parameters are garbage, and rank 0's change with every step: they have to be broadcast "
                "anew for each batch, before the forward.",
            ),
            [("    for parameter in model.parameters():\n        ctx.comm.broadcast(parameter)\n", "")],
        ),
        Mistake(
            "averages-the-gradients",
            (
                "The first loss is right, the second is not. By which factor are the gradients wrong?",
                "Rank 0 computed the loss over all outputs, a mean over the whole batch. Each rank's gradient is "
                "already its share of that mean, so the sum is right. It is DDP, with a loss on each rank, that has "
                "to average.",
            ),
            [
                (
                    "parameter.grad = ctx.comm.reduce(parameter.grad)",
                    "parameter.grad = ctx.comm.reduce(parameter.grad) / ctx.world_size",
                )
            ],
        ),
        Mistake(
            "keeps-its-own-gradients",
            (
                "`reduce` gives the sum back. Where does it go in your program?",
                "`ctx.comm.reduce(tensor)` leaves `tensor` as it is and returns the sum on rank 0. Unless you put "
                "that into `parameter.grad`, rank 0 steps with the gradient of its own share only.",
            ),
            [
                (
                    "parameter.grad = ctx.comm.reduce(parameter.grad)",
                    "ctx.comm.reduce(parameter.grad)",
                )
            ],
        ),
        Mistake(
            "a-loss-of-its-own-on-each-rank",
            (
                "On whose targets does each rank compute its loss?",
                "In DP only rank 0 has targets: it gathers the outputs, computes the one loss, and sends each rank the "
                "gradient of the outputs that came from it.",
                "On rank 0: `whole.requires_grad_()`, the loss of `whole`, its gradient; then scatter that gradient, "
                "and `outputs.backward(mine)` on every rank.",
            ),
            [
                (
                    "    outputs.backward(ctx.comm.scatter(gradient))\n",
                    "    F.mse_loss(outputs, targets[: len(outputs)]).div(ctx.world_size).backward()\n",
                )
            ],
        ),
        Mistake(
            "all-reduce-instead-of-reduce",
            (
                "The result is right. Who needs the gradients?",
                "Only rank 0 steps, so only rank 0 needs the sum: a reduce moves half of what an all-reduce does. "
                "(When every rank takes the step itself, the all-reduce comes into its own: that is DDP.)",
            ),
            [
                (
                    "parameter.grad = ctx.comm.reduce(parameter.grad)",
                    "ctx.comm.all_reduce(parameter.grad)",
                )
            ],
            when=lambda seen: calls(Kind.ALL_REDUCE)(seen) > 0 and "not DP's" in seen.budget,
        ),
        Mistake(
            "backward-through-the-wire",
            (
                "Autograd says that something has no history. What of what arrives by communication has one?",
                "The gathered outputs are new tensors: no gradient flows through the gather by itself. Make them a "
                "leaf (`whole.requires_grad_()`), take the loss's gradient for them, and send it back yourself.",
            ),
            [("        whole.requires_grad_()\n", "")],
            when=lambda seen: "does not require grad" in seen.error,
        ),
    ),
    otherwise=(
        "Name, for each of the five exchanges, who gives, who gets, and the shape of what travels. Then look at the "
        "timeline: is the order that of the text?",
    ),
)
