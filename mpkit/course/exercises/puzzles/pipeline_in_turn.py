"""Puzzle 6: a pipeline, one micro-batch at a time.

Instead of the batch, divide the network: with k = L/n layers per rank, rank r has the layers rk to rk + k - 1. An
output goes to the next rank, and the gradient of an input goes back to the rank before. Take one micro-batch at a time,
forward through all ranks and backward again, before the next one enters. Update once in the end.

Each rank holds only its layers. But how many ranks compute at the same time?

Targets, with L layers, m micro-batches, n ranks and k = L/n: time 3Lm + 0.2(n-1)m + k/2, which is 147.9 for 12 layers
and 4 micro-batches on 4 ranks; memory 7k + 6, which is 27.
"""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case, Mistake
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
    start="Take your answer to puzzle 2, with the layers in `mine` only. Where does the first of them get its input, "
    "if r > 0, and where does the gradient of the last one's output come from, if r < n - 1?",
    mistakes=(
        Mistake(
            "all-layers-on-every-rank",
            (
                "The weights are right. How many layers' weights are in memory on each rank?",
                "All, and a rank computes with its own layers only.",
                "`loaded = {i: layers.load(i) for i in mine}`",
            ),
            [("layers.load(i) for i in mine}", "layers.load(i) for i in range(layers.count)}")],
            when=lambda seen: seen.budget == MEMORY and not whole_batch(seen),
        ),
        Mistake(
            "the-whole-batch-at-once",
            (
                "The weights are right. How many micro-batches are in memory at the same time?",
                "All of them. One micro-batch goes forward and backward through all ranks, and then the next.",
            ),
            """
            def pipeline_in_turn(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
                n, r = ctx.world_size, ctx.rank
                k, m = layers.count // n, layers.microbatches
                mine = range(r * k, (r + 1) * k)
                loaded = {i: layers.load(i) for i in mine}
                inputs = [layers.inputs(range(m)) if r == 0 else ctx.comm.recv(layers.empty(m), r - 1)]
                for i in mine:
                    inputs.append(layers.forward(i, inputs[-1], loaded[i][0]))
                if r == n - 1:
                    dy = layers.loss(inputs.pop(), range(m))
                else:
                    ctx.comm.send(inputs.pop(), r + 1)
                    dy = ctx.comm.recv(layers.empty(m), r + 1)
                for i in reversed(mine):
                    dweight, dy = layers.backward(i, inputs.pop(), dy, loaded[i][0])
                    layers.update(i, *loaded[i], dweight)
                    del dweight
                if r > 0:
                    ctx.comm.send(dy, r - 1)
                return {i: loaded[i][0] for i in mine}
            """,
            when=lambda seen: seen.budget and whole_batch(seen),
        ),
        Mistake(
            "an-update-per-micro-batch",
            (
                "How often does each weight change, and how often should it in one step?",
                "Once, with the sum of the gradients of all micro-batches.",
                "Add up in the loop, as in puzzle 2, and update after it.",
            ),
            [
                (
                    "            if i in gradients:\n                gradients[i] += dweight\n            else:\n    ",
                    "",
                ),
                (
                    "            gradients[i] = dweight\n",
                    "            layers.update(i, *loaded[i], dweight)\n",
                ),
                ("    for i in mine:\n        layers.update(i, *loaded[i], gradients.pop(i))\n", ""),
            ],
        ),
        Mistake(
            "gradients-are-not-sent",
            (
                "The report says who waits for a message that never comes. Is it an output, or a gradient?",
                "Every rank but the last waits for the gradient of its output. The rank after it has that: the "
                "gradient of *its* input, from the backward of its first layer.",
                "After the backwards: `if r > 0: ctx.comm.send(dy, r - 1)`",
            ),
            [("        if r > 0:\n            ctx.comm.send(dy, r - 1)\n", "")],
            when=lambda seen: "never sent it" in seen.hang,
        ),
        Mistake(
            "every-rank-takes-the-inputs",
            (
                "What is the input of the first layer in `mine`, on rank 1?",
                "The output of the layer before, which rank 0 computed. `layers.inputs` is for layer 0.",
                "`ctx.comm.recv(layers.empty(), r - 1)`",
            ),
            [
                (
                    "        inputs = [layers.inputs([number]) if r == 0 else ctx.comm.recv(layers.empty(), r - 1)]\n",
                    "        inputs = [layers.inputs([number])]\n"
                    "        if r > 0:\n"
                    "            ctx.comm.recv(layers.empty(), r - 1)\n",
                ),
            ],
        ),
        Mistake(
            "the-gradient-it-got",
            (
                "What does a rank send back: the gradient of its output, or of its input?",
                "That of its input, as the backward of its first layer makes it.",
                "`dweight, dy = layers.backward(...)` in the loop, and send the last `dy`.",
            ),
            [
                (
                    "        for i in reversed(mine):\n",
                    "        got = dy\n        for i in reversed(mine):\n",
                ),
                ("ctx.comm.send(dy, r - 1)", "ctx.comm.send(got, r - 1)"),
            ],
        ),
        Mistake(
            "forwards-twice",
            (
                "The weights are right, and the time is too long. What do you compute twice?",
                "Each forward has been done: keep the inputs of this rank's layers until their backwards.",
            ),
            [
                (
                    "            dweight, dy = layers.backward(i, inputs.pop(), dy, loaded[i][0])\n",
                    "            x = inputs[0]\n"
                    "            for before in range(mine[0], i):\n"
                    "                x = layers.forward(before, x, loaded[before][0])\n"
                    "            dweight, dy = layers.backward(i, x, dy, loaded[i][0])\n"
                    "            del x, inputs[-1:]\n"
                    "            inputs = inputs or [layers.empty()]\n",
                ),
            ],
            when=lambda seen: seen.budget == TIME,
        ),
    ),
    otherwise=(
        "Take one micro-batch on 2 ranks first: forward, send, receive the gradient, backward, send.",
        "Compare what rank 1 receives with the output of layer k - 1 in puzzle 1.",
    ),
)
