"""Puzzle 3: data parallel.

n ranks with a copy of the network each. Rank r takes the micro-batches r, r + n, r + 2n ..., all of them at once, and
the gradients of the ranks are added up by an all-reduce, so that every rank makes the same update.

Targets, with L layers, m micro-batches and n ranks: time 3Lm/n + L/2 + 0.2(n-1)L, which is 8.2 for 2 layers and 4
micro-batches on 4 ranks, and memory 4L + (L+2)m/n + 4, which is 16. (An all-reduce that runs while the next layer's
backward computes would be faster still; `async_op=True` does that, and is not asked for.)
"""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.layers import MEMORY, TIME, budgets, play, train_layers
from mpkit.course.framework.measures import calls
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.trace import Kind


# %% answer
def data_parallel_by_layers(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
    """Train one step on the micro-batches of all ranks; return all weights, the same on every rank."""
    ### BEGIN SOLUTION
    mine = range(ctx.rank, layers.microbatches, ctx.world_size)
    loaded = [layers.load(i) for i in range(layers.count)]
    inputs = [layers.inputs(mine)]
    for i, (weight, _) in enumerate(loaded):
        inputs.append(layers.forward(i, inputs[-1], weight))
    dy = layers.loss(inputs.pop(), mine)
    for i, (weight, momentum) in reversed(list(enumerate(loaded))):
        dweight, dy = layers.backward(i, inputs.pop(), dy, weight)
        ctx.comm.all_reduce(dweight)
        layers.update(i, weight, momentum, dweight)
        del dweight
    return {i: weight for i, (weight, _) in enumerate(loaded)}
    ### END SOLUTION


# %% checks
def expected(case: Case) -> list[dict[int, Tensor]]:
    """Return the trained weights, for every rank."""
    return [dict(enumerate(train_layers(case)))] * case.ranks


def updates_first(seen: Seen) -> bool:
    """Return whether rank 0 makes an update before it adds up anything."""
    assert seen.trace is not None
    kinds = [int(kind) for kind in seen.trace.ranks[0].ops["kind"]]
    first = {kind: kinds.index(kind) for kind in (Kind.OPTIMIZER, Kind.ALL_REDUCE) if kind in kinds}
    return len(first) == 2 and first[Kind.OPTIMIZER] < first[Kind.ALL_REDUCE]


EXERCISE = OnRanks(
    solution=data_parallel_by_layers,
    cases=(Case(4, 5, {"layers": 2, "microbatches": 4}), Case(2, 6, {"layers": 3, "microbatches": 4})),
    play=play,
    expected=expected,
    result="the weights after the step",
    budgets=budgets(
        lambda case: (
            3 * case["layers"] * case["microbatches"] / case.ranks
            + case["layers"] / 2
            + 0.2 * (case.ranks - 1) * case["layers"]
        ),
        lambda case: 4 * case["layers"] + (case["layers"] + 2) * case["microbatches"] / case.ranks + 4,
    ),
    after="02-data-parallel",
    place=30,
    start="Your answer to puzzle 1, with other micro-batches: `range(ctx.rank, layers.microbatches, ctx.world_size)`. "
    "What has to happen to a weight's gradient between its backward and its update?",
    mistakes=(
        Mistake(
            "everybody-takes-the-whole-batch",
            (
                "The weights are right. How much of the batch does each rank compute on?",
                "All of it, so n ranks are as slow as one. Each has to take its share.",
                "`mine = range(ctx.rank, layers.microbatches, ctx.world_size)`, for the inputs and the loss.",
            ),
            [
                ("range(ctx.rank, layers.microbatches, ctx.world_size)", "range(layers.microbatches)"),
                ("ctx.comm.all_reduce(dweight)", 'ctx.comm.all_reduce(dweight, op="mean")'),
            ],
            when=lambda seen: seen.budget == TIME,
        ),
        Mistake(
            "no-all-reduce",
            (
                "Are the weights the same on every rank after the step?",
                "Each rank has updated with the gradient of its own micro-batches. The step is made with the sum over "
                "all ranks.",
                "`ctx.comm.all_reduce(dweight)`, before the update.",
            ),
            [("        ctx.comm.all_reduce(dweight)\n", "")],
        ),
        Mistake(
            "averages-the-weights",
            (
                "You communicate after the update. Which gradient did each rank update with?",
                "With that of its own micro-batches: momenta differ from rank to rank from then on, and the mean of "
                "the weights is a step with an n-th of the gradient. Add up gradients, before the update.",
                "`ctx.comm.all_reduce(dweight)` between `layers.backward` and `layers.update`.",
            ),
            [
                (
                    "        ctx.comm.all_reduce(dweight)\n        layers.update(i, weight, momentum, dweight)",
                    "        layers.update(i, weight, momentum, dweight)\n"
                    '        ctx.comm.all_reduce(weight, op="mean")',
                ),
            ],
            when=updates_first,
        ),
        Mistake(
            "averaged",
            (
                "Of which mean does `layers.loss` give the gradient?",
                "Of the mean over the whole batch of all ranks. So the ranks' gradients are parts of a sum: add them "
                "up, and divide by nothing.",
            ),
            [("ctx.comm.all_reduce(dweight)", 'ctx.comm.all_reduce(dweight, op="mean")')],
        ),
        Mistake(
            "gathers-all-gradients",
            (
                "The sum is right. What does a rank hold of the other ranks' gradients?",
                "An all-gather puts n gradients side by side on each rank before you add them. An all-reduce adds on "
                "the way.",
            ),
            [
                (
                    "ctx.comm.all_reduce(dweight)",
                    "dweight = sum(ctx.comm.all_gather(dweight).chunk(ctx.world_size))",
                )
            ],
            when=lambda seen: seen.budget == MEMORY and calls(Kind.ALL_GATHER)(seen) > 0,
        ),
    ),
    otherwise=("Compare the gradient of the last layer, after the all-reduce, with that of puzzle 1.",),
)
