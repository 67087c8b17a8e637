"""Puzzle 2: one micro-batch at a time."""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case
from mpkit.course.framework.layers import MEMORY, budgets, play, train_layers, whole_batch
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def micro_batches_in_turn(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
    """Train one step, one micro-batch at a time; return the weights."""
    ### BEGIN SOLUTION
    loaded = [layers.load(i) for i in range(layers.count)]
    gradients: dict[int, Tensor] = {}
    for number in range(layers.microbatches):
        inputs = [layers.inputs([number])]
        for i, (weight, _) in enumerate(loaded):
            inputs.append(layers.forward(i, inputs[-1], weight))
        dy = layers.loss(inputs.pop(), [number])
        for i, (weight, _) in reversed(list(enumerate(loaded))):
            dweight, dy = layers.backward(i, inputs.pop(), dy, weight)
            if i in gradients:
                gradients[i] += dweight
            else:
                gradients[i] = dweight
            del dweight
        del dy
    for i, (weight, momentum) in enumerate(loaded):
        layers.update(i, weight, momentum, gradients.pop(i))
    return {i: weight for i, (weight, _) in enumerate(loaded)}
    ### END SOLUTION


# %% checks
def expected(case: Case) -> list[dict[int, Tensor]]:
    """Return the trained weights."""
    return [dict(enumerate(train_layers(case)))]


EXERCISE = OnRanks(
    solution=micro_batches_in_turn,
    cases=(Case(1, 3, {"layers": 2, "microbatches": 4}), Case(1, 4, {"layers": 4, "microbatches": 3})),
    play=play,
    expected=expected,
    result="the weights after the step",
    budgets=budgets(
        lambda case: 3 * case["layers"] * case["microbatches"] + case["layers"] / 2,
        lambda case: 7 * case["layers"] + 4,
    ),
    after="00-start-here",
    place=20,
    when={
        "the-whole-batch-at-once": lambda seen: seen.budget == MEMORY and whole_batch(seen),
        "keeps-the-gradients-of-each-micro-batch": lambda seen: seen.budget == MEMORY,
    },
)
