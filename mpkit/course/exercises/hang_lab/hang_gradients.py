"""Hang: gradients.

A layer's weight is sharded: of its gradient each rank needs only its own rows, averaged over ranks, which is a
reduce-scatter. Its bias is on every rank, and so its gradient is averaged by an all-reduce. The program below sends the
larger gradient first, so that it is on its way early.

With some inputs it would wait for ever, and mpkit stops it. **Check it as it is, and read the report**: which two calls
met, on which ranks, and what put them in that order? Then mend it. A rank still gets no more than it needs: one
reduce-scatter of the weight's gradient and one all-reduce of the bias's gradient send all there is to send.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import calls, wire
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.trace import Kind


# %% answer
def average(ctx: mk.Context, layer: nn.Linear, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the mean loss over all ranks' samples.

    layer: equal on all ranks. x, y: this rank's samples, the same number on each rank. Returns the gradients: "weight",
    this rank's rows, and "bias", all of it.
    """
    F.mse_loss(layer(x), y).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    averaged = {}
    ### BEGIN SOLUTION
    # instead: for name in sorted(gradients, key=lambda name: gradients[name].norm(), reverse=True):
    for name in sorted(gradients):
        if name == "weight":
            averaged[name] = ctx.comm.reduce_scatter(gradients[name]) / ctx.world_size
        else:
            averaged[name] = ctx.comm.all_reduce(gradients[name], op="mean")
    # instead:     if name == "weight":
    # instead:         averaged[name] = ctx.comm.reduce_scatter(gradients[name]) / ctx.world_size
    # instead:     else:
    # instead:         averaged[name] = ctx.comm.all_reduce(gradients[name], op="mean")
    ### END SOLUTION
    return averaged


# %% checks
def given(case: Case) -> tuple[nn.Linear, Tensor, Tensor]:
    """Return a layer, and samples for each rank: (ranks, 6, ...). Small inputs make the weight's gradient small."""
    generator = case.generator()
    layer = nn.Linear(3, 2 * case.ranks).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(case.ranks, 6, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(case.ranks, 6, 2 * case.ranks, generator=generator, dtype=torch.float64)
    return layer, x * torch.tensor(([9.0, 0.1] * case.ranks)[: case.ranks]).view(-1, 1, 1), y


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer with this rank's samples."""
    assert callable(answer)
    layer, x, y = given(case)
    return answer(ctx, layer, x[ctx.rank], y[ctx.rank])


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the serial gradients of all samples at once, the weight's cut into each rank's rows."""
    layer, x, y = given(case)
    F.mse_loss(layer(x.flatten(0, 1)), y.flatten(0, 1)).backward()
    weight, bias = layer.weight.grad, layer.bias.grad
    assert weight is not None and bias is not None
    return [{"weight": rows, "bias": bias} for rows in weight.chunk(case.ranks)]


SENT = "bytes that a rank sends, on a ring"


def enough(case: Case) -> float:
    """Return the bytes of a reduce-scatter of the weight's gradient, and of an all-reduce of the bias's."""
    layer = given(case)[0]
    return (case.ranks - 1) / case.ranks * (layer.weight.nbytes + 2 * layer.bias.nbytes)


LARGEST_FIRST = "for name in sorted(gradients, key=lambda name: gradients[name].norm(), reverse=True):"

EXERCISE = OnRanks(
    solution=average,
    cases=(Case(2, 1), Case(3, 2), Case(4, 3)),
    play=play,
    expected=expected,
    result="the averaged gradients",
    budgets=(Budget(SENT, wire, enough, "bytes"),),
    after="03-zero",
    place=30,
    start="Check the program as it is, and read the report: which two calls met, on which ranks?",
    mistakes=(
        Mistake(
            "a-barrier",
            (
                "Look at the report: did the barrier change which collective each rank calls next?",
                "A barrier makes the ranks meet, and then they go on in different orders, as before. What has to be "
                "equal is the order itself.",
                "Nothing in the loop's order may depend on a rank's own numbers.",
            ),
            [
                ("for name in sorted(gradients):", LARGEST_FIRST),
                ('        if name == "weight":', '        ctx.comm.barrier()\n        if name == "weight":'),
            ],
            when=lambda seen: seen.mismatch and calls(Kind.BARRIER)(seen) > 0,
        ),
        Mistake(
            "another-order-on-each-rank",
            (
                "The report names the two collectives that met. What does each rank call first, and how does it "
                "decide that?",
                "The n-th collective of one rank meets the n-th of every other. Here the order comes from norms of "
                "gradients, which are different on every rank: one begins with the weight, another with the bias.",
                "Take an order that is the same everywhere: the names in a fixed order, not sorted by anything a "
                "rank alone knows.",
            ),
            [("for name in sorted(gradients):", LARGEST_FIRST)],
            when=lambda seen: "reduce_scatter(" in seen.mismatch,
        ),
        Mistake(
            "one-kind-in-different-orders",
            (
                "Both ranks of the report call all_reduce. Which tensor does each of them bring to it?",
                "Now all call all_reduce, but one rank brings the weight's gradient and another the bias's. If they "
                "had the same size, they would be added up, and nobody would notice.",
                "It is the order that has to be equal on all ranks: one that no rank's own numbers decide.",
            ),
            [
                ("for name in sorted(gradients):", LARGEST_FIRST),
                (
                    "ctx.comm.reduce_scatter(gradients[name]) / ctx.world_size",
                    'ctx.comm.all_reduce(gradients[name], op="mean").chunk(ctx.world_size)[ctx.rank]',
                ),
            ],
            when=lambda seen: seen.mismatch,
        ),
        Mistake(
            "everything-all-reduced",
            (
                "It ends. How many rows of the weight's gradient does a rank have, and how many does it need?",
                "With one kind of collective the hang is gone, and so is the shard: a rank needs only its own rows, "
                "and an all_reduce brings all. (With an order that depends on the rank, it would also add weights "
                "to biases.)",
                "Keep the reduce_scatter for the weight, and give the loop a fixed order.",
            ),
            [
                (
                    "averaged[name] = ctx.comm.reduce_scatter(gradients[name]) / ctx.world_size",
                    'averaged[name] = ctx.comm.all_reduce(gradients[name], op="mean")',
                )
            ],
        ),
        Mistake(
            "all-reduced-and-cut",
            (
                "It ends, and it is right. How many rows of the weight's gradient does a rank receive, and how many "
                "does it return?",
                "An all-reduce is a reduce-scatter and an all-gather: you pay for the second, and throw away what it "
                "brings. Keep the reduce-scatter, and give the loop a fixed order.",
            ),
            [
                (
                    "ctx.comm.reduce_scatter(gradients[name]) / ctx.world_size",
                    'ctx.comm.all_reduce(gradients[name], op="mean").chunk(ctx.world_size)[ctx.rank]',
                )
            ],
            when=lambda seen: seen.budget == SENT,
        ),
        Mistake(
            "nobody-communicates",
            (
                "It ends. Are these the gradients of all samples, or of this rank's?",
                "Without communication each rank has the gradients of its own samples only. They have to be "
                "averaged over the ranks.",
            ),
            [
                (
                    "ctx.comm.reduce_scatter(gradients[name]) / ctx.world_size",
                    "gradients[name].chunk(ctx.world_size)[ctx.rank]",
                ),
                ('ctx.comm.all_reduce(gradients[name], op="mean")', "gradients[name]"),
            ],
        ),
        Mistake(
            "summed-not-averaged",
            (
                "It ends. How many times too large is the weight's gradient?",
                "reduce_scatter gives the sum over ranks. The mean loss over all samples has the mean of the "
                "gradients.",
                "Divide by `ctx.world_size`, as the program did.",
            ),
            [("reduce_scatter(gradients[name]) / ctx.world_size", "reduce_scatter(gradients[name])")],
        ),
    ),
    otherwise=(
        "It is no longer the hang. Take one rank's samples and then all of them: what has each gradient to be?",
    ),
)
