"""Puzzle 8: a pipeline, fully sharded."""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Answer, Case
from mpkit.course.framework.layers import MEMORY, TIME, budgets, in_turn, play, train_layers
from mpkit.course.framework.measures import calls
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks
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
def run(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run the answer on its layers, with the case's number of replicas."""
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
    when={
        "keeps-the-gathered-weights": lambda seen: seen.budget == MEMORY and gathers(seen) < 0.9,
        "still-all-reduces": lambda seen: seen.budget == TIME and calls(Kind.ALL_REDUCE)(seen) > 0,
        "everybody-takes-the-whole-batch": lambda seen: seen.budget == TIME and not in_turn(seen),
        "one-at-a-time": lambda seen: seen.budget == TIME,
        "the-sum-over-all-stages": lambda seen: (
            seen.mismatch or seen.hang or "needs the whole weight" in seen.error
        ),
    },
)
