"""Cut into stages."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.course.framework.exercise import Answer, Case
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.own_stages import record_stage
from mpkit.course.framework.serial import mlp


# %% answer
def cut_into_stages(model: nn.Sequential, p: int) -> list[nn.Sequential]:
    """Cut `model`, a chain of at least p layers, into p stages, as even as possible, the longer ones first."""
    ### BEGIN SOLUTION
    layers = list(model)
    stages, first = [], 0
    for stage in range(p):
        count = len(layers) // p + (stage < len(layers) % p)
        stages.append(nn.Sequential(*layers[first : first + count]))
        first += count
    return stages
    ### END SOLUTION


# %% checks
def batch(case: Case) -> Tensor:
    """Return inputs (4, 6)."""
    return torch.randn(4, 6, generator=case.generator(), dtype=torch.float64)


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run a batch through the answer's stages on the ranks; return this rank's layers and output."""
    model, x = mlp(case["layers"], case.seed), batch(case)
    stages = list(answer(model, ctx.world_size))
    result: dict[str, object] = {"stages": len(stages), "layers": None, "output": None}
    if len(stages) != ctx.world_size:
        return result
    stage = stages[ctx.rank]
    result["layers"] = [i for i, layer in enumerate(model) if any(layer is each for each in stage)]
    if ctx.rank > 0:
        ctx.comm.recv(x, ctx.rank - 1)
    with torch.no_grad():
        x = record_stage(ctx, stage)(x)
    if ctx.rank + 1 < ctx.world_size:
        ctx.comm.send(x, ctx.rank + 1)
    return {**result, "output": x}


def expected(case: Case) -> list[object]:
    """Return, by rank, its layers and the model's activations after them."""
    model, x = mlp(case["layers"], case.seed), batch(case)
    bounds = [-(-case["layers"] * stage // case.ranks) for stage in range(case.ranks + 1)]
    counts = sorted((last - first for first, last in pairwise(bounds)), reverse=True)
    results: list[object] = []
    first = 0
    for count in counts:
        layers = list(range(first, first + count))
        with torch.no_grad():
            x = nn.Sequential(*(model[i] for i in layers))(x)
        results.append({"stages": case.ranks, "layers": layers, "output": x})
        first += count
    return results


EXERCISE = OnRanks(
    solution=cut_into_stages,
    cases=(
        Case(2, 1, {"layers": 6}),
        Case(3, 2, {"layers": 8}),
        Case(3, 3, {"layers": 4}),
        Case(4, 4, {"layers": 11}),
    ),
    play=play,
    expected=expected,
    result="the stages, and their outputs",
    after="01-pipeline-bubbles",
    place=10,
    when={
        "one-stage-too-many": lambda seen: any(got["stages"] > seen.case.ranks for got in seen.got or ()),
    },
)
