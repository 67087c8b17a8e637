"""Puzzle 1: one device."""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case
from mpkit.course.framework.layers import MEMORY, TIME, budgets, play, train_layers
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def one_device(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
    """Train one step on all micro-batches at once; return the weights."""
    ### BEGIN SOLUTION
    everything = range(layers.microbatches)
    loaded = [layers.load(i) for i in range(layers.count)]
    inputs = [layers.inputs(everything)]
    for i, (weight, _) in enumerate(loaded):
        inputs.append(layers.forward(i, inputs[-1], weight))
    dy = layers.loss(inputs.pop(), everything)
    for i, (weight, momentum) in reversed(list(enumerate(loaded))):
        dweight, dy = layers.backward(i, inputs.pop(), dy, weight)
        layers.update(i, weight, momentum, dweight)
        del dweight
    return {i: weight for i, (weight, _) in enumerate(loaded)}
    ### END SOLUTION


# %% checks
def expected(case: Case) -> list[dict[int, Tensor]]:
    """Return the trained weights."""
    return [dict(enumerate(train_layers(case)))]


EXERCISE = OnRanks(
    solution=one_device,
    cases=(Case(1, 1, {"layers": 2, "microbatches": 4}), Case(1, 2, {"layers": 5, "microbatches": 2})),
    play=play,
    expected=expected,
    result="the weights after the step",
    budgets=budgets(
        lambda case: 3 * case["layers"] * case["microbatches"] + case["layers"] / 2,
        lambda case: 4 * case["layers"] + (case["layers"] + 2) * case["microbatches"] + 2,
    ),
    after="00-start-here",
    place=10,
    when={
        "nothing-is-freed": lambda seen: seen.budget == MEMORY,
        "forwards-twice": lambda seen: seen.budget == TIME,
    },
)
