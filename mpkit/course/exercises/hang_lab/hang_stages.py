"""Hang: the stages.

GPipe on real ranks: a model is cut into stages, one per rank, and a batch into micro-batches of `size` samples. All
forwards first, each sent on to the next stage; then all backwards, each gradient sent back. The last micro-batch may be
smaller than the others.

The program below waits for ever, with some batches and not with others. **Check it as it is, and read the report**: the
tag of a message says which it is, F2 the forward of micro-batch 2, B2 the gradient that comes back. Which message does
somebody wait for, and who never comes to it? Then mend it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import calls, messages
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.trace import Kind


# %% answer
def gpipe_step(ctx: mk.Context, stage: nn.Linear, x: Tensor, y: Tensor, size: int) -> Tensor | None:
    """Return the gradient of the mean loss over the batch with respect to this stage's weight.

    stage: this rank's, of d inputs and d outputs. x, y: (b, d), the whole batch, on every rank; the first stage takes
    x, the last one y. size: the samples per micro-batch. Returns (d, d).
    """
    first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
    inputs, outputs = [], []
    ### BEGIN SOLUTION
    # instead: if first:
    # instead:     sizes = [len(part) for part in x.split(size)]
    # instead: else:
    # instead:     sizes = [size] * (len(x) // size)
    sizes = [len(part) for part in x.split(size)]
    ### END SOLUTION
    # forwards
    for m, samples in enumerate(sizes):
        if first:
            given = x.split(size)[m]
        else:
            given = ctx.comm.recv(
                x.new_empty(samples, x.shape[1]), ctx.rank - 1, tag=f"F{m}"
            ).requires_grad_()
        inputs.append(given)
        outputs.append(stage(given))
        if not last:
            ctx.comm.send(outputs[m], ctx.rank + 1, tag=f"F{m}")
    # backwards
    for m, samples in enumerate(sizes):
        if last:
            loss = F.mse_loss(outputs[m], y.split(size)[m]) * samples / len(y)
            loss.backward()
        else:
            outputs[m].backward(ctx.comm.recv(torch.empty_like(outputs[m]), ctx.rank + 1, tag=f"B{m}"))
        if not first:
            ctx.comm.send(inputs[m].grad, ctx.rank - 1, tag=f"B{m}")
    return stage.weight.grad


# %% checks
def given(case: Case) -> tuple[list[nn.Linear], Tensor, Tensor]:
    """Return all stages, and a batch."""
    generator, width = case.generator(), 2 + case.ranks
    stages = [nn.Linear(width, width).double() for _ in range(case.ranks)]
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x, y = torch.randn(2, case["batch"], width, generator=generator, dtype=torch.float64)
    return stages, x, y


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer with this rank's stage."""
    assert callable(answer)
    stages, x, y = given(case)
    return answer(ctx, stages[ctx.rank], x, y, case["size"])


def expected(case: Case) -> list[Tensor]:
    """Return the serial gradients: the whole batch goes through all stages."""
    stages, x, y = given(case)
    loss = F.mse_loss(nn.Sequential(*stages)(x), y)
    return list(torch.autograd.grad(loss, [stage.weight for stage in stages]))


def forwards(case: Case) -> int:
    """Return the number of micro-batches, with the last and smaller one."""
    return -(-int(case["batch"]) // int(case["size"]))


SIZES = "sizes = [len(part) for part in x.split(size)]"
BROKEN = f"{SIZES} if first else [size] * (len(x) // size)"

EXERCISE = OnRanks(
    solution=gpipe_step,
    cases=(
        Case(3, 1, {"batch": 7, "size": 2}),
        Case(2, 2, {"batch": 8, "size": 3}),
        Case(3, 3, {"batch": 8, "size": 2}),
        Case(4, 4, {"batch": 9, "size": 2}),
    ),
    play=play,
    expected=expected,
    result="the gradient of its stage",
    budgets=(
        Budget(
            "messages that a rank sends", messages, lambda case: forwards(case) * (2 if case.ranks > 2 else 1)
        ),
    ),
    after="01-pipeline-bubbles",
    place=50,
    start="Check the program as it is, and read the report: who waits, in what, and for whom?",
    mistakes=(
        Mistake(
            "a-barrier",
            (
                "Look at the report: does every rank come to the barrier?",
                "A barrier between forwards and backwards does not help a stage that sends one forward more than "
                "the next receives: it never comes to the barrier.",
                "Count the micro-batches on each stage. It has to be the same number.",
            ),
            [
                (SIZES, BROKEN),
                ("    # backwards\n", "    ctx.comm.barrier()\n    # backwards\n"),
            ],
            when=lambda seen: seen.hang and calls(Kind.BARRIER)(seen) > 0,
        ),
        Mistake(
            "a-backward-too-few",
            (
                "The report names a message B: a gradient. How many backwards does each stage do?",
                "Every forward needs its backward, on every stage. One of the stages does one less than the next.",
            ),
            [
                (
                    "    # backwards\n    for m, samples in enumerate(sizes):",
                    "    # backwards\n    for m, samples in enumerate(sizes[: len(sizes) - last]):",
                )
            ],
            when=lambda seen: "waits in recv from" in seen.hang and "waits in send" not in seen.hang,
        ),
        Mistake(
            "a-micro-batch-too-few",
            (
                "Which message does rank 0 send that rank 1 never receives? How many micro-batches does rank 1 "
                "count?",
                "7 samples in micro-batches of 2 are four: 2, 2, 2 and 1. Rank 0 splits the batch and has four; the "
                "others compute `len(x) // size`, which is rounded down, and have three.",
                "Let all stages count alike: `sizes = [len(part) for part in x.split(size)]`, for the buffers as "
                "well.",
            ),
            [(SIZES, BROKEN)],
            when=lambda seen: "never received it" in seen.hang,
        ),
        Mistake(
            "drops-the-last-micro-batch",
            (
                "It ends. Which samples has the first stage never sent?",
                "Now all stages round down, and the last micro-batch is left out. Its samples belong to the batch, "
                "and to the mean.",
                "Round up: there is one more micro-batch, with what is left.",
            ),
            [(SIZES, "sizes = [size] * (len(x) // size)")],
        ),
        Mistake(
            "buffers-of-full-size",
            (
                "The number of micro-batches is right now. Of how many samples is the last one?",
                "You receive the last micro-batch into a buffer for `size` samples, but fewer come. A message and "
                "its buffer must have the same shape: what is left over in the buffer is anything.",
                "`sizes = [len(part) for part in x.split(size)]` gives the right number for each.",
            ),
            [(SIZES, "sizes = [size] * -(-len(x) // size)")],
            when=lambda seen: seen.mismatch,
        ),
        Mistake(
            "micro-batches-count-alike",
            (
                "It ends, and where all micro-batches are equal it is right. How much does the smaller one count?",
                "The mean over the batch is not the mean of the micro-batches' means, if one of them is smaller: a "
                "sample in it would count more.",
                "A micro-batch of k samples out of K counts k/K.",
            ),
            [("* samples / len(y)", "/ len(sizes)")],
        ),
    ),
    otherwise=(
        "It is no longer the hang. Write down the micro-batches of 7 samples in pieces of 2, and what each stage "
        "receives, computes and sends for the last of them.",
    ),
)
