"""Cut into stages.

A pipeline begins with a model that is cut: a list of layers becomes p stages, each a contiguous part, so that stage
after stage is the model. Every layer is in exactly one stage, and it is the layer itself, not a copy: its weights are
what is trained.

    7 layers, p = 3      0 1 2 | 3 4 | 5 6

Stages are as even as can be. Where p does not divide the number of layers, the first stages have one layer more.

Your stages are put on p ranks, and a batch goes through them, from rank to rank.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.serial import mlp
from mpkit.course.framework.staged import record_stage


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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run a batch through the answer's stages on the ranks; return this rank's layers and output."""
    assert callable(answer)
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
    start="`list(model)` are the layers, and `nn.Sequential(*layers[0:2])` is a stage of the first two. How many "
    "layers has stage s, and where does it begin?",
    mistakes=(
        Mistake(
            "drops-the-rest",
            (
                "Add up the layers of your stages. Are they all there?",
                "`len(layers) // p` is rounded down: with 8 layers and 3 stages, 2 layers are in no stage. A layer "
                "that is in none is a layer that the model has lost.",
                "The first `len(layers) % p` stages have one layer more.",
            ),
            [(" + (stage < len(layers) % p)", "")],
        ),
        Mistake(
            "the-rest-on-the-last",
            (
                "How many layers has the longest stage, and how many the shortest?",
                "If the last stage takes all that is left over, it can be nearly twice as long as the others, and "
                "all wait for it. Deal what is left over, one layer a stage.",
            ),
            [
                (
                    "len(layers) // p + (stage < len(layers) % p)",
                    "len(layers) // p if stage < p - 1 else len(layers)",
                )
            ],
        ),
        Mistake(
            "rounds-up",
            (
                "Look at the last stage of a case with 4 layers and 3 stages.",
                "If every stage takes as many as the longest, nothing is left for the last one: 2 + 2 + 0. Only the "
                "first `len(layers) % p` stages have one more.",
            ),
            [("len(layers) // p + (stage < len(layers) % p)", "-(-len(layers) // p)")],
        ),
        Mistake(
            "dealt-like-cards",
            (
                "In which order do your layers get the batch?",
                "A stage is a contiguous part of the model. With layers 0, 3, 6 on the first stage, layer 3 would "
                "run before layer 1.",
                "Cut slices, `layers[first : first + count]`, not `layers[stage::p]`.",
            ),
            [("layers[first : first + count]", "layers[stage::p]")],
        ),
        Mistake(
            "copies",
            (
                "The outputs are right. Which weights would the optimizer of the model train?",
                "A copy of a layer has weights of its own: train it, and the model's stay as they were. Put the "
                "layers themselves into the stages.",
            ),
            [
                ("layers = list(model)", "import copy\n\n    layers = copy.deepcopy(list(model))"),
            ],
        ),
        Mistake(
            "one-stage-too-many",
            (
                "How many stages do you return, and how many were asked for?",
                "Chunks of `len(layers) // p` layers are more than p where p does not divide: the rest becomes a "
                "stage of its own. Fix the number of stages, and spread the rest.",
            ),
            """
            def cut_into_stages(model: nn.Sequential, p: int) -> list[nn.Sequential]:
                layers = list(model)
                size = len(layers) // p
                return [nn.Sequential(*layers[i : i + size]) for i in range(0, len(layers), size)]
            """,
            when=lambda seen: any(got["stages"] > seen.case.ranks for got in seen.got or ()),
        ),
    ),
    otherwise=(
        "Print the numbers of the layers in each stage for 7 layers and p = 3: they should be 0 1 2 | 3 4 | 5 6.",
    ),
)
