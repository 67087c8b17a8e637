"""Hang: the stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case
from mpkit.course.framework.measures import calls, messages
from mpkit.course.framework.on_ranks import OnRanks, call_with
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


def inputs(case: Case, rank: int) -> tuple[nn.Linear, Tensor, Tensor, int]:
    """Return a rank's stage, the batch, and the size of a micro-batch."""
    stages, x, y = given(case)
    return stages[rank], x, y, case["size"]


def expected(case: Case) -> list[Tensor]:
    """Return the serial gradients: the whole batch goes through all stages."""
    stages, x, y = given(case)
    loss = F.mse_loss(nn.Sequential(*stages)(x), y)
    return list(torch.autograd.grad(loss, [stage.weight for stage in stages]))


def forwards(case: Case) -> int:
    """Return the number of micro-batches, with the last and smaller one."""
    return -(-int(case["batch"]) // int(case["size"]))


EXERCISE = OnRanks(
    solution=gpipe_step,
    cases=(
        Case(3, 1, {"batch": 7, "size": 2}),
        Case(2, 2, {"batch": 8, "size": 3}),
        Case(3, 3, {"batch": 8, "size": 2}),
        Case(4, 4, {"batch": 9, "size": 2}),
    ),
    play=call_with(inputs),
    expected=expected,
    result="the gradient of its stage",
    budgets=(
        Budget(
            "messages that a rank sends", messages, lambda case: forwards(case) * (2 if case.ranks > 2 else 1)
        ),
    ),
    after="01-pipeline-bubbles",
    place=50,
    when={
        "a-barrier": lambda seen: seen.hang and calls(Kind.BARRIER)(seen) > 0,
        "a-backward-too-few": lambda seen: (
            "waits in recv from" in seen.hang and "waits in send" not in seen.hang
        ),
        "a-micro-batch-too-few": lambda seen: "never received it" in seen.hang,
        "buffers-of-full-size": lambda seen: seen.mismatch,
    },
)
