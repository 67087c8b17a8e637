"""Puzzle 4: data parallel, weights in parts.

A copy of the network on each rank takes memory that grows with L. Let each rank keep an n-th of the rows of each weight
and of its momentum, and gather a weight when its layer is computed: once for the forward and once more for the
backward. In between let it go. The gradients are added up by an all-reduce, as before; a rank updates its n-th.

Micro-batches as in puzzle 3: r, r + n, ... on rank r, all at once. Return the parts: `{i: part of weight i}`.

Targets, with L layers, m micro-batches and n ranks: time 3Lm/n + L/(2n) + 0.4(n-1)L, which is 25.95 for 6 layers and
4 micro-batches on 4 ranks; memory 4L/n + (L+2)m/n + 6, which is 20. (With whole weights it would be 34.)
"""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.layers import MEMORY, TIME, budgets, in_parts, play
from mpkit.course.framework.measures import calls
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.trace import Kind


# %% answer
def weights_in_parts(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
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
        ctx.comm.all_reduce(dweight)
        layers.update(i, part, momentum, dweight.chunk(n)[r])
        del weight, dweight
    return {i: part for i, (part, _) in enumerate(loaded)}
    ### END SOLUTION


# %% checks
def gathered_twice(seen: Seen) -> bool:
    """Return whether a rank gathered each weight for the backward again, or nearly so."""
    return calls(Kind.ALL_GATHER)(seen) > 1.5 * seen.case["layers"]


EXERCISE = OnRanks(
    solution=weights_in_parts,
    cases=(Case(2, 7, {"layers": 3, "microbatches": 4}), Case(4, 8, {"layers": 6, "microbatches": 4})),
    play=play,
    expected=in_parts,
    result="the parts of the weights after the step",
    budgets=budgets(
        lambda case: (
            3 * case["layers"] * case["microbatches"] / case.ranks
            + case["layers"] / (2 * case.ranks)
            + 0.4 * (case.ranks - 1) * case["layers"]
        ),
        lambda case: (
            4 * case["layers"] / case.ranks + (case["layers"] + 2) * case["microbatches"] / case.ranks + 6
        ),
    ),
    after="03-zero",
    place=40,
    start="`layers.load(i, r, n)` is this rank's part, and `ctx.comm.all_gather(part)` the whole weight. Which part of "
    "the gradient belongs to it?",
    mistakes=(
        Mistake(
            "keeps-the-gathered-weights",
            (
                "The weights are right. How many whole weights are in memory when the loss is computed?",
                "All that were gathered for the forward. Let each go after its layer, and gather it again for the "
                "backward: the target of time has room for both.",
            ),
            [
                ("        del weight\n", "        whole[i] = weight\n"),
                ("    dy = layers.loss", "    dy = layers.loss"),
                ("    inputs = [layers.inputs(mine)]", "    whole = {}\n    inputs = [layers.inputs(mine)]"),
                (
                    "loaded))):\n        weight = ctx.comm.all_gather(part)",
                    "loaded))):\n        weight = whole.pop(i)",
                ),
            ],
            when=lambda seen: seen.budget == MEMORY and seen.trace is not None and not gathered_twice(seen),
        ),
        Mistake(
            "whole-momenta",
            (
                "What else does a rank keep for each weight, for the whole step?",
                "Its momentum, which is as large. A rank updates its part, and needs the momentum of that part only.",
                "`layers.load(i, r, n)` gives both.",
            ),
            """
            def weights_in_parts(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
                n, r = ctx.world_size, ctx.rank
                mine = range(r, layers.microbatches, n)
                parts = [layers.load(i, r, n)[0] for i in range(layers.count)]
                momenta = [layers.load(i)[1] for i in range(layers.count)]
                inputs = [layers.inputs(mine)]
                for i, part in enumerate(parts):
                    inputs.append(layers.forward(i, inputs[-1], ctx.comm.all_gather(part)))
                dy = layers.loss(inputs.pop(), mine)
                for i, part in reversed(list(enumerate(parts))):
                    dweight, dy = layers.backward(i, inputs.pop(), dy, ctx.comm.all_gather(part))
                    ctx.comm.all_reduce(dweight)
                    layers.update(i, part, momenta[i].chunk(n)[r], dweight.chunk(n)[r])
                    del dweight
                return dict(enumerate(parts))
            """,
            when=lambda seen: seen.budget == MEMORY,
        ),
        Mistake(
            "no-all-reduce",
            (
                "Whose micro-batches have a part in the gradient that you update with?",
                "This rank's only. The sum over all ranks is the gradient of the whole batch.",
            ),
            [("        ctx.comm.all_reduce(dweight)\n", "")],
        ),
        Mistake(
            "the-first-part-of-the-gradient",
            (
                "Which rows of the weight does rank 1 keep?",
                "The second n-th of them: so the second n-th of the gradient belongs to it.",
                "`dweight.chunk(n)[r]`",
            ),
            [("dweight.chunk(n)[r]", "dweight.chunk(n)[0]")],
        ),
        Mistake(
            "computes-with-a-part",
            (
                "A forward needs the whole weight. Who has the rest of it?",
                "Each rank has an n-th: `ctx.comm.all_gather(part)` puts them together, in the order of the ranks.",
            ),
            [("ctx.comm.all_gather(part)", "part")],
            when=lambda seen: "needs the whole weight" in seen.error,
        ),
        Mistake(
            "everybody-takes-the-whole-batch",
            (
                "How much of the batch does each rank compute on?",
                "Each has to take its share: `range(r, layers.microbatches, n)`.",
            ),
            [
                ("range(r, layers.microbatches, n)", "range(layers.microbatches)"),
                ("ctx.comm.all_reduce(dweight)", 'ctx.comm.all_reduce(dweight, op="mean")'),
            ],
            when=lambda seen: seen.budget == TIME,
        ),
    ),
    otherwise=("Gather a weight after the step on every rank, and compare it with that of puzzle 1.",),
)
