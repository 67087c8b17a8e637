"""Checkpoint every k-th block.

Keeping the input of a whole stage and running all of it again saves memory between the stages only: in the second
forward all activations of the stage are there at once. Keeping every block's input is what training does anyway.
Between the two: cut the L blocks into segments of k, keep the input of each *segment*, and go back segment by segment.

    forward     x ──▶ [0 1 2 3] ──▶ [4 5 6 7] ──▶ [8 9 10 11]        kept: the input of each segment, L/k tensors
    backward    segment [8 9 10 11] again, with a graph: k activations; backward through it; then [4 5 6 7] ...

Together L/k + k activations: choose k so that this is least. L need not be a multiple of k.

The answer runs forward and backward of L blocks on one rank. Write it by hand, without torch.utils.checkpoint.

Budgets: each block runs forward twice at most. And activations, each as large as x: 2 sqrt(L) of them, rounded up, and
6 more for the work that is being done.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, sqrt

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import peak
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.course.framework.serial import fill
from mpkit.course.framework.staged import calls_the_library, checkpoint_by_hand, record_stage
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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer; return the gradients. The trace has the forwards of each block."""
    assert callable(answer)
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
    start="Cut the list first: `[blocks[first : first + k] for first in range(0, len(blocks), k)]`. Then the forward, "
    "under `torch.no_grad()`, which keeps the input of each segment; then one segment's backward.",
    mistakes=(
        calls_the_library(
            """
            def forward_backward(blocks: list[nn.Module], x: Tensor, dy: Tensor) -> Tensor:
                start = out = x.detach().requires_grad_()
                out = torch.utils.checkpoint.checkpoint_sequential(
                    blocks, max(1, round(len(blocks) ** 0.5)), out, use_reentrant=True
                )
                out.backward(dy)
                return start.grad
            """
        ),
        Mistake(
            "the-graph-of-everything",
            (
                "The gradients are right. What does the first forward keep?",
                "With a graph, the activations of all blocks. The first forward has to leave none.",
                "`with torch.no_grad():` around the first forward; the segments' second forwards make their graphs.",
            ),
            """
            def forward_backward(blocks: list[nn.Module], x: Tensor, dy: Tensor) -> Tensor:
                y = x.requires_grad_()
                for block in blocks:
                    y = block(y)
                y.backward(dy)
                return x.grad
            """,
            when=lambda seen: seen.budget == HELD and forwards(seen) == 1,
        ),
        Mistake(
            "again-from-the-beginning",
            (
                "How often does the first block run?",
                "You go from x to each block again, L times for L blocks. Keep inputs on the way, so that each segment "
                "can start from its own.",
                "`inputs.append(x)` at the beginning of each segment, in the forward.",
            ),
            """
            def forward_backward(blocks: list[nn.Module], x: Tensor, dy: Tensor) -> Tensor:
                for last in reversed(range(len(blocks))):
                    with torch.no_grad():
                        y = x
                        for block in blocks[:last]:
                            y = block(y)
                    y = y.detach().requires_grad_()
                    blocks[last](y).backward(dy)
                    dy = y.grad
                return dy
            """,
            when=lambda seen: seen.budget == TWICE,
        ),
        Mistake(
            "one-segment",
            (
                "How many activations are there while the second forward runs?",
                "A single segment has all L of them. Many segments have few each, and many inputs that are kept: "
                "L/k + k together. Which k makes that least?",
                "`k = round(len(blocks) ** 0.5)`",
            ),
            [("k = round(len(blocks) ** 0.5)", "k = len(blocks)")],
            when=lambda seen: seen.budget == HELD and segments(seen) == 1,
        ),
        Mistake(
            "every-input",
            (
                "How many tensors are kept when the first forward is done?",
                "The input of each single block: L of them. Of a segment only the first block's input has to be kept.",
                "`k = round(len(blocks) ** 0.5)`",
            ),
            [("k = round(len(blocks) ** 0.5)", "k = 1")],
            when=lambda seen: seen.budget == HELD and segments(seen) == seen.case["blocks"],
        ),
        Mistake(
            "forgets-the-last-blocks",
            (
                "With 103 blocks something is missing. Is 103 a multiple of your k?",
                "`len(blocks) // k` segments of k leave out what is left over. The last segment may be shorter.",
                "`range(0, len(blocks), k)`",
            ),
            [("range(0, len(blocks), k)", "range(0, len(blocks) // k * k, k)")],
        ),
        Mistake(
            "segments-in-forward-order",
            (
                "Which segment's output has the gradient dy?",
                "Only the last one's. Its backward gives the gradient of its input, which is the output of the segment "
                "before.",
                "`for segment in reversed(segments):`, and take the inputs from the end as well.",
            ),
            [
                ("for segment in reversed(segments):", "for segment in segments:"),
                ("inputs.pop()", "inputs.pop(0)"),
            ],
        ),
        Mistake(
            "the-same-gradient-for-each-segment",
            (
                "With one block all is right. What does the second segment go backward from?",
                "From the gradient of *its* output: that of the input of the segment after it, which you have just "
                "computed.",
                "`dy = start.grad`, at the end of the loop.",
            ),
            [("        dy = start.grad\n    return dy", "        dx = start.grad\n    return dx")],
        ),
    ),
    otherwise=("Try it with one block, then with as many as a segment has, then with one more.",),
)
