"""Checkpoint every k-th block."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, sqrt

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import peak
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.own_stages import calls_library, checkpoint_by_hand, record_stage
from mpkit.course.framework.serial import fill
from mpkit.trace import Kind


# %% answer
def forward_backward(blocks: list[nn.Module], x: Tensor, dy: Tensor) -> Tensor:
    """Run the blocks one after the other, and back again; return the gradient of x.

    x: (samples, width), the input of blocks[0]; dy: the gradient of the last block's output, of the same shape.
    The parameters' gradients go to `.grad`. No block has dropout.
    """
    ### BEGIN SOLUTION
    k = round(len(blocks) ** 0.5)
    segments = [blocks[first : first + k] for first in range(0, len(blocks), k)]
    # forward
    inputs = []
    with torch.no_grad():
        for segment in segments:
            inputs.append(x)
            for block in segment:
                x = block(x)
    # backward
    for segment in reversed(segments):
        start = x = inputs.pop().detach().requires_grad_()
        for block in segment:
            x = block(x)
        x.backward(dy)
        dy = start.grad
    return dy
    ### END SOLUTION


# %% checks
SAMPLES, WIDTH = 64, 8
HELD, TWICE = "peak of the activations", "forwards of a block"


def given(case: Case) -> tuple[list[nn.Module], Tensor, Tensor]:
    """Return the blocks, the input, and the gradient of the output."""
    blocks = fill(
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(case["blocks"]))),
        case.seed,
    )
    x, dy = torch.randn(2, SAMPLES, WIDTH, generator=case.generator(), dtype=torch.float64)
    return list(blocks), x, dy


def gradients(blocks: list[nn.Module], dx: object) -> dict[str, object]:
    """Return the gradients of the input and of all parameters."""
    named = nn.ModuleList(blocks).named_parameters()
    return {"gradient of x": dx, **{name: parameter.grad for name, parameter in named}}


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run the answer; return the gradients. The trace has the forwards of each block."""
    blocks, x, dy = given(case)
    for number, block in enumerate(blocks):
        record_stage(ctx, block, number)
    with Memory(ctx, nn.ModuleList(blocks).parameters()), checkpoint_by_hand():
        dx = answer(blocks, x, dy)
    return gradients(blocks, dx)


def expected(case: Case) -> list[dict[str, object]]:
    """Return the gradients of an ordinary backward."""
    blocks, x, dy = given(case)
    nn.Sequential(*blocks)(x.requires_grad_()).backward(dy)
    return [gradients(blocks, x.grad)]


def enough(case: Case) -> float:
    """Return the bytes of 2 sqrt(L) activations, rounded up, and of 6 more."""
    return float((ceil(2 * sqrt(case["blocks"])) + 6) * SAMPLES * WIDTH * 8)


def forwards(seen: Seen) -> float:
    """Return how often the block that ran most often ran forward."""
    assert seen.trace is not None
    ops = seen.trace.ranks[0].ops
    runs = [
        int((ops["stage"][ops["kind"] == Kind.FORWARD] == block).sum())
        for block in range(seen.case["blocks"])
    ]
    return float(max(runs))


def segments(seen: Seen) -> int:
    """Return how many backwards begin right after a block's second forward: one for each segment."""
    assert seen.trace is not None
    kinds = [int(kind) for kind in seen.trace.ranks[0].ops["kind"]]
    return sum(pair == (Kind.FORWARD, Kind.BACKWARD) for pair in pairwise(kinds))


EXERCISE = OnRanks(
    solution=forward_backward,
    cases=(Case(1, 1, {"blocks": 1}), Case(1, 2, {"blocks": 16}), Case(1, 3, {"blocks": 103})),
    play=play,
    expected=expected,
    result="the gradients of x and of the parameters",
    budgets=(Budget(TWICE, forwards, 2), Budget(HELD, peak("activations"), enough, "bytes")),
    after="01-pipeline-bubbles",
    place=95,
    when={
        "calls-the-library": calls_library,
        "the-graph-of-everything": lambda seen: seen.budget == HELD and forwards(seen) == 1,
        "again-from-the-beginning": lambda seen: seen.budget == TWICE,
        "one-segment": lambda seen: seen.budget == HELD and segments(seen) == 1,
        "every-input": lambda seen: seen.budget == HELD and segments(seen) == seen.case["blocks"],
    },
)
