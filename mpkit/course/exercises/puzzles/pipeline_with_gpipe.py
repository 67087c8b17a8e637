"""Puzzle 7: a pipeline with GPipe's schedule."""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case
from mpkit.course.framework.layers import MEMORY, TIME, budgets, in_turn, play, staged_weights, whole_batch
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def pipeline_with_gpipe(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
    """Train one step, all forwards and then all backwards; return the weights of this rank's layers."""
    n, r = ctx.world_size, ctx.rank
    k = layers.count // n
    mine = range(r * k, (r + 1) * k)
    ### BEGIN SOLUTION
    loaded = {i: layers.load(i) for i in mine}
    inputs: dict[int, list[Tensor]] = {}
    losses: dict[int, Tensor] = {}
    for number in range(layers.microbatches):
        xs = [layers.inputs([number]) if r == 0 else ctx.comm.recv(layers.empty(), r - 1)]
        for i in mine:
            xs.append(layers.forward(i, xs[-1], loaded[i][0]))
        if r == n - 1:
            losses[number] = layers.loss(xs.pop(), [number])
        else:
            ctx.comm.send(xs.pop(), r + 1)
        inputs[number] = xs
    gradients: dict[int, Tensor] = {}
    for number in range(layers.microbatches):
        dy = losses.pop(number) if r == n - 1 else ctx.comm.recv(layers.empty(), r + 1)
        for i in reversed(mine):
            dweight, dy = layers.backward(i, inputs[number].pop(), dy, loaded[i][0])
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
    solution=pipeline_with_gpipe,
    cases=(Case(2, 13, {"layers": 6, "microbatches": 4}), Case(4, 14, {"layers": 12, "microbatches": 4})),
    play=play,
    expected=staged_weights,
    result="the weights of the rank's layers after the step",
    budgets=budgets(
        lambda case: (
            3 * case["layers"] / case.ranks * (case["microbatches"] + case.ranks - 1)
            + 0.2 * (case.ranks - 1)
            + case["layers"] / case.ranks / 2
        ),
        lambda case: (
            6 * case["layers"] / case.ranks + (case["layers"] / case.ranks + 1) * case["microbatches"] + 3
        ),
    ),
    after="01-pipeline-bubbles",
    place=70,
    when={
        "the-whole-batch-at-once": lambda seen: seen.budget == TIME and whole_batch(seen),
        "still-one-at-a-time": lambda seen: seen.budget == TIME and in_turn(seen),
        "sends-when-all-are-done": lambda seen: seen.budget == TIME,
        "nothing-is-freed": lambda seen: seen.budget == MEMORY,
    },
)
