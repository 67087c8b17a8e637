"""Puzzle 5: fully sharded.

In puzzle 4 an all-reduce gave every rank the whole sum of each gradient, and each threw most of it away. A
reduce-scatter gives rank r the r-th part of the sum, in half the time. The rest is as before: weights and momenta in
parts, gathered for a forward and for a backward.

Targets, with L layers, m micro-batches and n ranks: time 3Lm/n + L/(2n) + 0.3(n-1)L, which is 24.15 for 6 layers and
4 micro-batches on 4 ranks; memory 4L/n + (L+2)m/n + 8, which is 22. (With whole weights it would be 34.)
"""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.layers import MEMORY, TIME, budgets, in_parts, play
from mpkit.course.framework.measures import calls
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.trace import Kind


# %% answer
def fully_sharded(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
    """Train one step, with weights in parts; return this rank's part of each weight."""
    n, r = ctx.world_size, ctx.rank
    ### BEGIN SOLUTION
    mine = range(r, layers.microbatches, n)
    loaded = [layers.load(i, r, n) for i in range(layers.count)]
    inputs = [layers.inputs(mine)]
    for i, (part, _) in enumerate(loaded):
        weight = ctx.comm.all_gather(part)
        inputs.append(layers.forward(i, inputs[-1], weight))
        del weight
    dy = layers.loss(inputs.pop(), mine)
    for i, (part, momentum) in reversed(list(enumerate(loaded))):
        weight = ctx.comm.all_gather(part)
        dweight, dy = layers.backward(i, inputs.pop(), dy, weight)
        del weight
        layers.update(i, part, momentum, ctx.comm.reduce_scatter(dweight))
        del dweight
    return {i: part for i, (part, _) in enumerate(loaded)}
    ### END SOLUTION


# %% checks
EXERCISE = OnRanks(
    solution=fully_sharded,
    cases=(Case(2, 9, {"layers": 3, "microbatches": 4}), Case(4, 10, {"layers": 6, "microbatches": 4})),
    play=play,
    expected=in_parts,
    result="the parts of the weights after the step",
    budgets=budgets(
        lambda case: (
            3 * case["layers"] * case["microbatches"] / case.ranks
            + case["layers"] / (2 * case.ranks)
            + 0.3 * (case.ranks - 1) * case["layers"]
        ),
        lambda case: (
            4 * case["layers"] / case.ranks + (case["layers"] + 2) * case["microbatches"] / case.ranks + 8
        ),
    ),
    after="03-zero",
    place=50,
    start="Take your answer to puzzle 4, and replace the all-reduce: `ctx.comm.reduce_scatter(dweight)` returns this "
    "rank's part of the sum.",
    mistakes=(
        Mistake(
            "still-all-reduces",
            (
                "Of the sum of the gradients that a rank receives, what does it use?",
                "An n-th. An all-reduce is a reduce-scatter and then an all-gather; you need the first half only.",
                "`ctx.comm.reduce_scatter(dweight)`",
            ),
            [("ctx.comm.reduce_scatter(dweight)", "ctx.comm.all_reduce(dweight).chunk(n)[r]")],
            when=lambda seen: seen.budget == TIME and calls(Kind.ALL_REDUCE)(seen) > 0,
        ),
        Mistake(
            "everybody-takes-the-whole-batch",
            (
                "How much of the batch does each rank compute on?",
                "Each has to take its share: `range(r, layers.microbatches, n)`.",
            ),
            [
                ("range(r, layers.microbatches, n)", "range(layers.microbatches)"),
                ("ctx.comm.reduce_scatter(dweight)", "ctx.comm.reduce_scatter(dweight) / n"),
            ],
            when=lambda seen: seen.budget == TIME,
        ),
        Mistake(
            "keeps-the-gathered-weights",
            (
                "The weights are right. How many whole weights are in memory when the loss is computed?",
                "All that were gathered for the forward. Let each go after its layer, and gather it again for the "
                "backward.",
            ),
            [
                ("        del weight\n    dy", "        whole[i] = weight\n    dy"),
                ("    inputs = [layers.inputs(mine)]", "    whole = {}\n    inputs = [layers.inputs(mine)]"),
                (
                    "loaded))):\n        weight = ctx.comm.all_gather(part)",
                    "loaded))):\n        weight = whole.pop(i)",
                ),
            ],
            when=lambda seen: (
                seen.budget == MEMORY and calls(Kind.ALL_GATHER)(seen) <= 1.5 * seen.case["layers"]
            ),
        ),
        Mistake(
            "averaged",
            (
                "Of which mean does `layers.loss` give the gradient?",
                "Of the mean over the whole batch of all ranks: the sum is the gradient. Divide by nothing.",
            ),
            [("ctx.comm.reduce_scatter(dweight)", "ctx.comm.reduce_scatter(dweight) / n")],
        ),
        Mistake(
            "no-reduce",
            (
                "Whose micro-batches have a part in the gradient that you update with?",
                "Its own part of its own gradient is not enough for a rank: the sum over all ranks, of this part.",
            ),
            [("ctx.comm.reduce_scatter(dweight)", "dweight.chunk(n)[r]")],
        ),
        Mistake(
            "weights-of-before-the-update",
            (
                "What do you return: the weights before the step, or after it?",
                "`layers.update` changes what it is given, in place. It has to be this rank's part itself, not a copy.",
            ),
            [("layers.update(i, part, momentum,", "layers.update(i, part.clone(), momentum,")],
        ),
    ),
    otherwise=("Gather a weight after the step on every rank, and compare it with that of puzzle 1.",),
)
