"""Puzzle 1: one device.

Train one step on the whole batch at once: all forwards, the loss, all backwards and updates. Nothing is divided yet;
what counts is to let go of every tensor early. When is an activation needed for the last time, and when the gradient of
a weight?

Targets, with L layers and m micro-batches: time 3Lm + L/2, memory 4L + (L+2)m + 2. That is 25 and 26 for the first
case, 2 layers and 4 micro-batches.
"""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case, Mistake
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
    start="Load all weights; then forward from layer to layer, and keep the input of each: its backward needs it. "
    "Backward from the last layer to the first.",
    mistakes=(
        Mistake(
            "nothing-is-freed",
            (
                "The weights are right. When the first backward runs, who still needs the last output?",
                "Nobody: the loss has made its gradient. And the input of a layer is needed until that layer's own "
                "backward. Take it out of the list there.",
                "`inputs.pop()`, at the loss and in each backward; and `dy` may replace the `dy` before.",
            ),
            [
                ("layers.loss(inputs.pop(), everything)", "layers.loss(inputs[-1], everything)"),
                ("layers.backward(i, inputs.pop(), dy, weight)", "layers.backward(i, inputs[i], dy, weight)"),
            ],
            when=lambda seen: seen.budget == MEMORY,
        ),
        Mistake(
            "one-micro-batch-after-the-other-with-an-update-each",
            (
                "How often does each weight change, and how often should it in one step?",
                "The step is one update, with the gradient of the whole batch. Here the whole batch goes at once.",
                "`everything = range(layers.microbatches)`, for the inputs and for the loss.",
            ),
            """
            def one_device(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
                loaded = [layers.load(i) for i in range(layers.count)]
                for number in range(layers.microbatches):
                    inputs = [layers.inputs([number])]
                    for i, (weight, _) in enumerate(loaded):
                        inputs.append(layers.forward(i, inputs[-1], weight))
                    dy = layers.loss(inputs.pop(), [number])
                    for i, (weight, momentum) in reversed(list(enumerate(loaded))):
                        dweight, dy = layers.backward(i, inputs.pop(), dy, weight)
                        layers.update(i, weight, momentum, dweight)
                return {i: weight for i, (weight, _) in enumerate(loaded)}
            """,
        ),
        Mistake(
            "the-output-for-the-input",
            (
                "Which x does the backward of layer i want: what went into it, or what came out?",
                "The input. The gradient of the weight is made from it.",
                "`inputs[i]` is the input of layer i, if `inputs[0]` is the input of the network.",
            ),
            [
                ("dy = layers.loss(inputs.pop(), everything)", "dy = layers.loss(inputs[-1], everything)"),
            ],
        ),
        Mistake(
            "updates-before-the-backward",
            (
                "With which weight does a layer's backward compute the gradient of its input?",
                "With the one that its forward had. If it is updated first, the layers before get the gradient of "
                "another network.",
                "Backward of layer i, then its update, then the layer before.",
            ),
            """
            def one_device(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
                everything = range(layers.microbatches)
                loaded = [layers.load(i) for i in range(layers.count)]
                inputs = [layers.inputs(everything)]
                for i, (weight, _) in enumerate(loaded):
                    inputs.append(layers.forward(i, inputs[-1], weight))
                dy = layers.loss(inputs.pop(), everything)
                for i, (weight, momentum) in reversed(list(enumerate(loaded))):
                    x = inputs.pop()
                    old = weight.clone()
                    dweight, _ = layers.backward(i, x, dy, old)
                    layers.update(i, weight, momentum, dweight)
                    _, dy = layers.backward(i, x, dy, weight)
                return {i: weight for i, (weight, _) in enumerate(loaded)}
            """,
        ),
        Mistake(
            "forwards-twice",
            (
                "The memory is fine, and the time too long. What do you compute twice?",
                "Each forward has been done: keep the inputs of all layers until their backwards. Computing them "
                "again pays where memory is short, and the target has room for them.",
            ),
            """
            def one_device(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
                everything = range(layers.microbatches)
                loaded = [layers.load(i) for i in range(layers.count)]
                dy = None
                for last in reversed(range(layers.count)):
                    x = layers.inputs(everything)
                    for i in range(last):
                        x = layers.forward(i, x, loaded[i][0])
                    if dy is None:
                        dy = layers.loss(layers.forward(last, x, loaded[last][0]), everything)
                    dweight, dy = layers.backward(last, x, dy, loaded[last][0])
                    layers.update(last, *loaded[last], dweight)
                return {i: weight for i, (weight, _) in enumerate(loaded)}
            """,
            when=lambda seen: seen.budget == TIME,
        ),
    ),
    otherwise=(
        "Take one layer first: load, inputs, forward, loss, backward, update. Then a second one around it.",
    ),
)
