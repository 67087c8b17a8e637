"""Puzzle 2: one micro-batch at a time.

The same step in less memory: run each micro-batch by itself, forward and backward, add up the gradients of the weights,
and update once in the end. No time is lost by it here; why is one batch at once done at all?

Targets, with L layers and m micro-batches: time 3Lm + L/2 as before, memory 7L + 4. That is 25 and 18 for the first
case, 2 layers and 4 micro-batches.
"""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case, Mistake
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
    start="Put a loop over micro-batches around your answer to puzzle 1, without the update. Where do the gradients of "
    "a layer's weight from all micro-batches come together?",
    mistakes=(
        Mistake(
            "the-whole-batch-at-once",
            (
                "The weights are right. How many micro-batches are in memory at the same time?",
                "All of them. Take one, forward and backward, and let go of its activations before the next.",
            ),
            """
            def micro_batches_in_turn(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
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
            """,
            when=lambda seen: seen.budget == MEMORY and whole_batch(seen),
        ),
        Mistake(
            "keeps-the-gradients-of-each-micro-batch",
            (
                "How many gradients of one weight are there in the end?",
                "One per micro-batch, to be added up later: that grows with m. Add each to the sum as soon as it is "
                "there, in place, and let go of it.",
                "`gradients[i] += dweight`, then `del dweight`.",
            ),
            [
                ("gradients[i] += dweight", "gradients[i].append(dweight)"),
                ("gradients[i] = dweight", "gradients[i] = [dweight]"),
                ("gradients.pop(i))", "sum(gradients.pop(i)))"),
            ],
            when=lambda seen: seen.budget == MEMORY,
        ),
        Mistake(
            "update-after-each-micro-batch",
            (
                "How often does each weight change in one step?",
                "Once, with the sum of the gradients. If it is updated in between, the next micro-batch sees other "
                "weights, and the momentum counts each time.",
            ),
            [
                (
                    "            if i in gradients:",
                    "            layers.update(i, weight, loaded[i][1], dweight)\n            if i in gradients:",
                ),
                ("        layers.update(i, weight, momentum, gradients.pop(i))", "        gradients.pop(i)"),
            ],
        ),
        Mistake(
            "the-last-gradient-only",
            (
                "Which micro-batches have a part in the update?",
                "Each backward gives the gradient of its own micro-batch. They have to be added up, not replaced.",
            ),
            [("gradients[i] += dweight", "gradients[i] = dweight")],
        ),
        Mistake(
            "divided-by-the-number-of-micro-batches",
            (
                "Of which mean does `layers.loss` give the gradient?",
                "Of the mean over the whole batch: each micro-batch's gradient is already its part of the sum. Nothing "
                "is left to divide by.",
            ),
            [("gradients.pop(i))", "gradients.pop(i) / layers.microbatches)")],
        ),
    ),
    otherwise=(
        "With one micro-batch it is puzzle 1. With two, compare the sum of the gradients with that of both at once.",
    ),
)
