"""Puzzle 3: data parallel."""

from __future__ import annotations

from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.puzzles import Layers
from mpkit.course.framework.exercise import Case
from mpkit.course.framework.layers import MEMORY, TIME, budgets, play, train_layers
from mpkit.course.framework.measures import calls
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.trace import Kind


# %% answer
def data_parallel_by_layers(ctx: mk.Context, layers: Layers) -> dict[int, Tensor]:
    """Train one step on the micro-batches of all ranks; return all weights, the same on every rank."""
    ### BEGIN SOLUTION
    mine = range(ctx.rank, layers.microbatches, ctx.world_size)
    loaded = [layers.load(i) for i in range(layers.count)]
    inputs = [layers.inputs(mine)]
    for i, (weight, _) in enumerate(loaded):
        inputs.append(layers.forward(i, inputs[-1], weight))
    dy = layers.loss(inputs.pop(), mine)
    for i, (weight, momentum) in reversed(list(enumerate(loaded))):
        dweight, dy = layers.backward(i, inputs.pop(), dy, weight)
        ctx.comm.all_reduce(dweight)
        layers.update(i, weight, momentum, dweight)
        del dweight
    return {i: weight for i, (weight, _) in enumerate(loaded)}
    ### END SOLUTION


# %% checks
def expected(case: Case) -> list[dict[int, Tensor]]:
    """Return the trained weights, for every rank."""
    return [dict(enumerate(train_layers(case)))] * case.ranks


def updates_first(seen: Seen) -> bool:
    """Return whether rank 0 makes an update before it adds up anything."""
    assert seen.trace is not None
    kinds = [int(kind) for kind in seen.trace.ranks[0].ops["kind"]]
    first = {kind: kinds.index(kind) for kind in (Kind.OPTIMIZER, Kind.ALL_REDUCE) if kind in kinds}
    return len(first) == 2 and first[Kind.OPTIMIZER] < first[Kind.ALL_REDUCE]


EXERCISE = OnRanks(
    solution=data_parallel_by_layers,
    cases=(Case(4, 5, {"layers": 2, "microbatches": 4}), Case(2, 6, {"layers": 3, "microbatches": 4})),
    play=play,
    expected=expected,
    result="the weights after the step",
    budgets=budgets(
        lambda case: (
            3 * case["layers"] * case["microbatches"] / case.ranks
            + case["layers"] / 2
            + 0.2 * (case.ranks - 1) * case["layers"]
        ),
        lambda case: 4 * case["layers"] + (case["layers"] + 2) * case["microbatches"] / case.ranks + 4,
    ),
    after="02-data-parallel",
    place=30,
    when={
        "everybody-takes-the-whole-batch": lambda seen: seen.budget == TIME,
        "averages-the-weights": updates_first,
        "gathers-all-gradients": lambda seen: seen.budget == MEMORY and calls(Kind.ALL_GATHER)(seen) > 0,
    },
)
