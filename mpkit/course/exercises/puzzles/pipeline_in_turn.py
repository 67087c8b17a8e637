"""Puzzle 6: a pipeline, one micro-batch at a time."""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case
from mpkit.course.framework.layers import MEMORY, TIME, budgets, play, staged_weights, whole_batch
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def pipeline_in_turn(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
    """Train one step, one micro-batch at a time through the ranks; return the weights of this rank's layers."""
    n, r = ctx.world_size, ctx.rank
    k = layers.count // n
    mine = range(r * k, (r + 1) * k)
    ### BEGIN SOLUTION
    loaded = {i: layers.load(i) for i in mine}
    gradients: dict[int, Tensor] = {}
    for number in range(layers.microbatches):
        inputs = [layers.inputs([number]) if r == 0 else ctx.comm.recv(layers.empty(), r - 1)]
        for i in mine:
            inputs.append(layers.forward(i, inputs[-1], loaded[i][0]))
        if r == n - 1:
            dy = layers.loss(inputs.pop(), [number])
        else:
            ctx.comm.send(inputs.pop(), r + 1)
            dy = ctx.comm.recv(layers.empty(), r + 1)
        for i in reversed(mine):
            dweight, dy = layers.backward(i, inputs.pop(), dy, loaded[i][0])
            if i in gradients:
                gradients[i] += dweight
            else:
                gradients[i] = dweight
            del dweight
        if r > 0:
            ctx.comm.send(dy, r - 1)
        del dy
    for i in mine:
        layers.update(i, *loaded[i], gradients.pop(i))
    return {i: loaded[i][0] for i in mine}
    ### END SOLUTION


# %% checks
EXERCISE = OnRanks(
    solution=pipeline_in_turn,
    cases=(Case(2, 11, {"layers": 6, "microbatches": 4}), Case(4, 12, {"layers": 12, "microbatches": 4})),
    play=play,
    expected=staged_weights,
    result="the weights of the rank's layers after the step",
    budgets=budgets(
        lambda case: (
            3 * case["layers"] * case["microbatches"]
            + 0.2 * (case.ranks - 1) * case["microbatches"]
            + case["layers"] / case.ranks / 2
        ),
        lambda case: 7 * case["layers"] / case.ranks + 6,
    ),
    after="01-pipeline-bubbles",
    place=60,
    when={
        "all-layers-on-every-rank": lambda seen: seen.budget == MEMORY and not whole_batch(seen),
        "the-whole-batch-at-once": lambda seen: seen.budget and whole_batch(seen),
        "gradients-are-not-sent": lambda seen: "never sent it" in seen.hang,
        "forwards-twice": lambda seen: seen.budget == TIME,
    },
)
