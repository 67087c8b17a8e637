"""Puzzle 8: a pipeline, fully sharded.

All together: s stages with k = L/s layers each, and d replicas of every stage, so n = sd ranks. Rank i is replica i % d
of stage i // d, and talks to the same replica of the stages before and after:

    stage 0    rank 0, rank 1     ◀─ these d replicas share the weights of layers 0 to k - 1
    stage 1    rank 2, rank 3     ◀─ and these the next k; rank 0 sends to rank 2, and rank 1 to rank 3

The replicas of a stage divide the micro-batches (replica r takes r, r + d, r + 2d ...) as well as the weights, as in
puzzle 5: each holds a d-th of the rows of each weight and of its momentum. A weight is gathered when its layer computes
one micro-batch, and let go at once; the gradient of each micro-batch goes through a reduce-scatter, and only this
rank's part is kept and added up. The schedule is that of puzzle 7. Return the parts of the stage's weights.

`group` (given) has the replicas of this stage: `ctx.comm.all_gather(part, group)`, `ctx.comm.reduce_scatter(x, group)`.

Targets, with L layers, m micro-batches, s stages, d replicas, k = L/s: time k(m/d + s - 1)(3 + 0.3(d-1)) + 0.2(s-1) +
k/(2d), which is 61.1 for 12 layers and 4 micro-batches on 2 stages with 2 replicas; memory 6k/d + (k+1)m/d + 5, which
is 37. (With whole weights and gradients it would be 55.) Gathering less often takes less time, and more memory.

Is this a good combination? Count the bytes that a rank sends for one micro-batch, and see Lamy-Poirier, "Breadth-First
Pipeline Parallelism", MLSys 2023.
"""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.layers import MEMORY, TIME, budgets, in_turn, play, train_layers
from mpkit.course.framework.measures import calls
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.trace import Kind


# %% answer
def pipeline_fully_sharded(ctx: mk.Context, layers: Layers, d: int) -> dict[int, Tensor]:
    """Train one step with d replicas of each stage; return this rank's part of each weight of its stage."""
    s, (stage, r) = ctx.world_size // d, divmod(ctx.rank, d)
    group = [ctx.comm.group(range(first, first + d)) for first in range(0, ctx.world_size, d)][stage]
    k = layers.count // s
    mine = range(stage * k, (stage + 1) * k)
    ### BEGIN SOLUTION
    before, after = ctx.rank - d, ctx.rank + d
    numbers = range(r, layers.microbatches, d)
    loaded = {i: layers.load(i, r, d) for i in mine}
    inputs: dict[int, list[Tensor]] = {}
    losses: dict[int, Tensor] = {}
    for number in numbers:
        xs = [layers.inputs([number]) if stage == 0 else ctx.comm.recv(layers.empty(), before)]
        for i in mine:
            weight = ctx.comm.all_gather(loaded[i][0], group)
            xs.append(layers.forward(i, xs[-1], weight))
            del weight
        if stage == s - 1:
            losses[number] = layers.loss(xs.pop(), [number])
        else:
            ctx.comm.send(xs.pop(), after)
        inputs[number] = xs
    gradients: dict[int, Tensor] = {}
    for number in numbers:
        dy = losses.pop(number) if stage == s - 1 else ctx.comm.recv(layers.empty(), after)
        for i in reversed(mine):
            weight = ctx.comm.all_gather(loaded[i][0], group)
            dweight, dy = layers.backward(i, inputs[number].pop(), dy, weight)
            del weight
            part = ctx.comm.reduce_scatter(dweight, group)
            gradients[i] = gradients[i] + part if i in gradients else part
            del dweight, part
        if stage > 0:
            ctx.comm.send(dy, before)
        del dy
    for i in mine:
        layers.update(i, *loaded[i], gradients.pop(i))
    return {i: loaded[i][0] for i in mine}
    ### END SOLUTION


# %% checks
def run(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer on its layers, with the case's number of replicas."""
    assert callable(answer)
    return play(ctx, lambda ctx, layers: answer(ctx, layers, case["replicas"]), case)


def expected(case: Case) -> list[dict[int, Tensor]]:
    """Return, by rank, its part of the rows of each trained weight of its stage."""
    weights, d = train_layers(case), case["replicas"]
    k = case["layers"] * d // case.ranks
    places = (divmod(rank, d) for rank in range(case.ranks))
    return [{i: weights[i].chunk(d)[r] for i in range(stage * k, (stage + 1) * k)} for stage, r in places]


def time(case: Case) -> float:
    """Return the target of time."""
    d, s = case["replicas"], case.ranks // case["replicas"]
    slots, k = case["microbatches"] / d + s - 1, case["layers"] / s
    return float(k * slots * (3 + 0.3 * (d - 1)) + 0.2 * (s - 1) + k / (2 * d))


def activations(case: Case) -> float:
    """Return the target of memory."""
    d, k = case["replicas"], case["layers"] * case["replicas"] / case.ranks
    return float(6 * k / d + (k + 1) * case["microbatches"] / d + 5)


def gathers(seen: Seen) -> float:
    """Return how often a rank gathered a weight, over the times that it needed one."""
    needed = 2 * seen.case["layers"] * seen.case["microbatches"] / seen.case.ranks
    return calls(Kind.ALL_GATHER)(seen) / needed


EXERCISE = OnRanks(
    solution=pipeline_fully_sharded,
    cases=(
        Case(4, 15, {"layers": 12, "microbatches": 4, "replicas": 2}),
        Case(4, 17, {"layers": 3, "microbatches": 4, "replicas": 4}),
        Case(6, 16, {"layers": 12, "microbatches": 4, "replicas": 2}),
    ),
    play=run,
    expected=expected,
    result="the parts of the stage's weights after the step",
    budgets=budgets(time, activations),
    after="07-three-dimensions",
    place=80,
    start="Take your answer to puzzle 7, with `layers.load(i, r, d)`, and with the neighbours `ctx.rank - d` and "
    "`ctx.rank + d`. Then gather before each forward and backward, as in puzzle 5.",
    mistakes=(
        Mistake(
            "keeps-the-gathered-weights",
            (
                "The weights are right. How many whole weights are in memory after the first forward?",
                "All k of the stage. Gather a weight for one layer of one micro-batch, and let it go: the target of "
                "time has room for that.",
                "`del weight` after the forward, and gather again in the backward.",
            ),
            [
                (
                    "    inputs: dict",
                    "    whole = {i: ctx.comm.all_gather(loaded[i][0], group) for i in mine}\n    inputs: dict",
                ),
                (
                    "            weight = ctx.comm.all_gather(loaded[i][0], group)\n            xs",
                    "            weight = whole[i]\n            xs",
                ),
                (
                    "            weight = ctx.comm.all_gather(loaded[i][0], group)\n            dweight",
                    "            weight = whole[i]\n            dweight",
                ),
            ],
            when=lambda seen: seen.budget == MEMORY and gathers(seen) < 0.9,
        ),
        Mistake(
            "still-all-reduces",
            (
                "Of the sum of the gradients that a rank receives, what does it use?",
                "A d-th. A reduce-scatter gives it just that, in half the time.",
                "`ctx.comm.reduce_scatter(dweight, group)`",
            ),
            [("reduce_scatter(dweight, group)", "all_reduce(dweight, group).chunk(d)[r].clone()")],
            when=lambda seen: seen.budget == TIME and calls(Kind.ALL_REDUCE)(seen) > 0,
        ),
        Mistake(
            "everybody-takes-the-whole-batch",
            (
                "How much of the batch does each replica compute on?",
                "The replicas divide it: `range(r, layers.microbatches, d)`.",
            ),
            [
                ("range(r, layers.microbatches, d)", "range(layers.microbatches)"),
                ("ctx.comm.reduce_scatter(dweight, group)", "ctx.comm.reduce_scatter(dweight, group) / d"),
            ],
            when=lambda seen: seen.budget == TIME and not in_turn(seen),
        ),
        Mistake(
            "one-at-a-time",
            (
                "What does stage 0 do between its first forward and its first backward?",
                "It waits for the gradient. All forwards come first, as in puzzle 7.",
            ),
            """
            def pipeline_fully_sharded(ctx: mk.Context, layers: Layers, d: int) -> dict[int, Tensor]:
                s, (stage, r) = ctx.world_size // d, divmod(ctx.rank, d)
                group = [ctx.comm.group(range(first, first + d)) for first in range(0, ctx.world_size, d)][stage]
                k = layers.count // s
                mine = range(stage * k, (stage + 1) * k)
                before, after = ctx.rank - d, ctx.rank + d
                loaded = {i: layers.load(i, r, d) for i in mine}
                gradients = {i: 0 for i in mine}
                for number in range(r, layers.microbatches, d):
                    xs = [layers.inputs([number]) if stage == 0 else ctx.comm.recv(layers.empty(), before)]
                    for i in mine:
                        xs.append(layers.forward(i, xs[-1], ctx.comm.all_gather(loaded[i][0], group)))
                    if stage == s - 1:
                        dy = layers.loss(xs.pop(), [number])
                    else:
                        ctx.comm.send(xs.pop(), after)
                        dy = ctx.comm.recv(layers.empty(), after)
                    for i in reversed(mine):
                        weight = ctx.comm.all_gather(loaded[i][0], group)
                        dweight, dy = layers.backward(i, xs.pop(), dy, weight)
                        gradients[i] = gradients[i] + ctx.comm.reduce_scatter(dweight, group)
                    if stage > 0:
                        ctx.comm.send(dy, before)
                for i in mine:
                    layers.update(i, *loaded[i], gradients[i])
                return {i: loaded[i][0] for i in mine}
            """,
            when=lambda seen: seen.budget == TIME,
        ),
        Mistake(
            "the-sum-over-all-stages",
            (
                "Which ranks have a gradient of the same layer?",
                "The d replicas of one stage. Gathering and reducing happens among these, and not among all ranks.",
                "Pass `group` to `all_gather` and to `reduce_scatter`.",
            ),
            [
                ("ctx.comm.all_gather(loaded[i][0], group)", "ctx.comm.all_gather(loaded[i][0])"),
                ("ctx.comm.reduce_scatter(dweight, group)", "ctx.comm.reduce_scatter(dweight)"),
            ],
            when=lambda seen: seen.mismatch or seen.hang or "needs the whole weight" in seen.error,
        ),
        Mistake(
            "no-reduce",
            (
                "Whose micro-batches have a part in the gradient that you update with?",
                "This replica's only. The other replicas have the rest of the batch: sum over `group`.",
            ),
            [("ctx.comm.reduce_scatter(dweight, group)", "dweight.chunk(d)[r].clone()")],
        ),
        Mistake(
            "averaged",
            (
                "Of which mean does `layers.loss` give the gradient?",
                "Of the mean over the whole batch of all ranks: the sum is the gradient. Divide by nothing.",
            ),
            [("ctx.comm.reduce_scatter(dweight, group)", "ctx.comm.reduce_scatter(dweight, group) / d")],
        ),
    ),
    otherwise=(
        "Print, by rank: stage, r, mine, and the ranks it talks to.",
        "Puzzle 7 with `load(i, r, d)` and a gather before each use is the forward half; make that right first.",
    ),
)
