"""Puzzle 7: a pipeline with GPipe's schedule.

In puzzle 6 one rank computes while all others wait. Let the next micro-batch enter as soon as the first rank is free:
all forwards, one micro-batch after the other, and then all backwards. Each output is sent on as soon as it is there.

    rank 0    F0 F1 F2 F3                   B   B   B   B
    rank 1       F0 F1 F2 F3            B   B   B   B
    rank 2          F0 F1 F2 F3     B   B   B   B
    rank 3             F0 F1 F2 F3  B   B   B   B

The time falls to less than half of it here, and the memory grows: what does a micro-batch leave behind that waits for
its backward? The layers are on the ranks as in puzzle 6, k = L/n on each. The backwards may come in any order.

Targets, with L layers, m micro-batches, n ranks and k = L/n: time 3k(m + n - 1) + 0.2(n-1) + k/2, which is 65.1 for
12 layers and 4 micro-batches on 4 ranks; memory 6k + (k+1)m + 3, which is 37.

Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3.
"""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case, Mistake
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
    start="Take your answer to puzzle 6, and make two loops of its loop: one with all forwards, one with all "
    "backwards. What has to be kept from the first for the second, and under which number?",
    mistakes=(
        Mistake(
            "the-whole-batch-at-once",
            (
                "When does rank 1 start: after the first micro-batch, or after all of them?",
                "What is computed at once is sent at once. Take one micro-batch after the other through the forwards, "
                "and send each output before the next forward.",
            ),
            """
            def pipeline_with_gpipe(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
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
            when=lambda seen: seen.budget == TIME and whole_batch(seen),
        ),
        Mistake(
            "still-one-at-a-time",
            (
                "What does rank 0 do between its first forward and its first backward?",
                "It waits for the gradient. It could start the next micro-batch's forward instead: all forwards come "
                "first.",
                "Two loops: what the first loop keeps, by number, the second one uses.",
            ),
            """
            def pipeline_with_gpipe(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
                n, r = ctx.world_size, ctx.rank
                k = layers.count // n
                mine = range(r * k, (r + 1) * k)
                loaded = {i: layers.load(i) for i in mine}
                gradients = {i: 0 for i in mine}
                for number in range(layers.microbatches):
                    xs = [layers.inputs([number]) if r == 0 else ctx.comm.recv(layers.empty(), r - 1)]
                    for i in mine:
                        xs.append(layers.forward(i, xs[-1], loaded[i][0]))
                    if r == n - 1:
                        dy = layers.loss(xs.pop(), [number])
                    else:
                        ctx.comm.send(xs.pop(), r + 1)
                        dy = ctx.comm.recv(layers.empty(), r + 1)
                    for i in reversed(mine):
                        dweight, dy = layers.backward(i, xs.pop(), dy, loaded[i][0])
                        gradients[i] = gradients[i] + dweight
                    if r > 0:
                        ctx.comm.send(dy, r - 1)
                for i in mine:
                    layers.update(i, *loaded[i], gradients[i])
                return {i: loaded[i][0] for i in mine}
            """,
            when=lambda seen: seen.budget == TIME and in_turn(seen),
        ),
        Mistake(
            "sends-when-all-are-done",
            (
                "The weights are right, and the time is too long. How long does a finished output wait to be sent?",
                "Until all forwards of this rank are done. Send each at once: the next rank has nothing else to do.",
                "`ctx.comm.send(...)` belongs into the loop, directly after the last of `mine`.",
            ),
            [
                ("            ctx.comm.send(xs.pop(), r + 1)\n", "            outputs.append(xs.pop())\n"),
                (
                    "    gradients: dict[int, Tensor] = {}\n",
                    "    while outputs:\n"
                    "        ctx.comm.send(outputs.pop(0), r + 1)\n"
                    "    gradients: dict[int, Tensor] = {}\n",
                ),
                ("    losses: dict", "    outputs: list[Tensor] = []\n    losses: dict"),
            ],
            when=lambda seen: seen.budget == TIME,
        ),
        Mistake(
            "nothing-is-freed",
            (
                "The weights are right. What is left of a micro-batch after its backward?",
                "Nothing is needed of it: take each input out of its list when its backward uses it. And an output "
                "that has been sent belongs to the next rank.",
                "`inputs[number].pop()` in the backward, and `xs.pop()` in what is sent.",
            ),
            [
                (
                    "losses[number] = layers.loss(xs.pop(), [number])",
                    "losses[number] = layers.loss(xs[-1], [number])",
                ),
                ("ctx.comm.send(xs.pop(), r + 1)", "ctx.comm.send(xs[-1], r + 1)"),
                ("inputs[number].pop()", "inputs[number][i - mine[0]]"),
            ],
            when=lambda seen: seen.budget == MEMORY,
        ),
        Mistake(
            "orders-that-differ",
            (
                "Rank 1 sends a gradient. Of which micro-batch is it, and for which one does rank 0 take it?",
                "Messages between two ranks arrive in the order in which they were sent. The backwards may come in any "
                "order, but in the same one on all ranks.",
            ),
            [
                (
                    "    for number in range(layers.microbatches):\n        dy",
                    "    for number in sorted(range(layers.microbatches), reverse=r == n - 1):\n        dy",
                ),
            ],
        ),
        Mistake(
            "the-last-micro-batch-only",
            (
                "Whose inputs does the second loop use?",
                "Each micro-batch needs its own: one list per micro-batch, under its number.",
                "`inputs[number] = xs`, and `inputs[number].pop()` in the backward.",
            ),
            [
                ("        inputs[number] = xs\n", "        inputs[0] = xs\n"),
                ("inputs[number].pop()", "inputs[0][i - mine[0]]"),
            ],
        ),
        Mistake(
            "gradients-are-replaced",
            (
                "How many micro-batches have a part in the gradient that you update with?",
                "Only the last. Add up, as in puzzle 2.",
            ),
            [("gradients[i] += dweight", "gradients[i] = dweight")],
        ),
    ),
    otherwise=(
        "Take one micro-batch first, then two: what rank 1 receives second has to be micro-batch 1.",
        "Draw who computes when, for 2 ranks and 2 micro-batches, and mark where your program differs.",
    ),
)
