"""Puzzle 4: data parallel, weights in parts."""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case
from mpkit.course.framework.layers import MEMORY, TIME, budgets, in_parts, play
from mpkit.course.framework.measures import calls
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks
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
    when={
        "keeps-the-gathered-weights": lambda seen: (
            seen.budget == MEMORY and seen.trace is not None and not gathered_twice(seen)
        ),
        "whole-momenta": lambda seen: seen.budget == MEMORY,
        "computes-with-a-part": lambda seen: "needs the whole weight" in seen.error,
        "everybody-takes-the-whole-batch": lambda seen: seen.budget == TIME,
    },
)
