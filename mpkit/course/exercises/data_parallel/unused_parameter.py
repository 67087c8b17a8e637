"""An unused parameter.

Not every forward uses every layer: experts, layers that are dropped, a head for a task that is not in this batch. What
a rank has not used has no gradient there: `parameter.grad` is None. If the ranks then all-reduce what they have, they
call different collectives, and hang or add up what does not belong together.

Write what averages the gradients over all ranks where some may be None:

- a parameter that **some rank** used gets the mean over all ranks; who did not use it counts as zeros;
- a parameter that **no rank** used keeps None, as in serial training. (Zeros are not the same: an optimizer with
  momentum or weight decay moves a parameter whose gradient is zero, and leaves one alone whose gradient is None.)

What the ranks have used changes from step to step. One small collective may tell everybody what the others used.
(`find_unused_parameters=True` of PyTorch's DDP and `unused="allow"` of the kit's `Plan` are about this.)
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def average_used(ctx: mk.Context, parameters: list[nn.Parameter]) -> None:
    """Replace each `parameter.grad`, a tensor or None, by its mean over ranks; None where every rank has None."""
    ### BEGIN SOLUTION
    used = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    ctx.comm.all_reduce(used)
    for parameter, count in zip(parameters, used.tolist(), strict=True):
        if count == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        ctx.comm.all_reduce(parameter.grad, op="mean")
    ### END SOLUTION


# %% checks
STEPS, SAMPLES = 4, 12


class Experts(nn.Module):
    """A model of three layers, of which the middle one is one of several experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(experts))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, expert: int | None) -> Tensor:
        """Return the outputs (samples, 3) for the inputs (samples, 6)."""
        x = torch.tanh(self.first(x))
        if expert is not None:
            x = torch.tanh(self.experts[expert](x))
        return self.last(x)


def chosen(case: Case, step: int, rank: int) -> int | None:
    """Choose the expert for a rank's samples: the last one is never used in step 1, and hardly ever by all ranks."""
    if step == 1:
        return None if rank == 0 else 0
    return (None, *range(case["experts"]))[(step + rank) % (case["experts"] + 1)]


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the weights after some steps."""
    assert callable(answer)
    model = serial.fill(Experts(case["experts"]), case.seed)
    optimizer = serial.sgd(model)
    for step, batch in enumerate(serial.batches(case, SAMPLES, STEPS)):
        x, y = serial.share(batch, ctx.rank, ctx.world_size)
        optimizer.zero_grad()
        serial.mse(model(x, chosen(case, step, ctx.rank)), y).backward()
        answer(ctx, list(model.parameters()))
        optimizer.step()
    return serial.weights(model)


def expected(case: Case) -> list[object]:
    """Return the weights of serial training with all ranks' losses, each with its own expert."""
    model = copy.deepcopy(serial.fill(Experts(case["experts"]), case.seed))
    optimizer = serial.sgd(model)
    for step, batch in enumerate(serial.batches(case, SAMPLES, STEPS)):
        optimizer.zero_grad()
        for rank in range(case.ranks):
            x, y = serial.share(batch, rank, case.ranks)
            torch.autograd.backward(serial.mse(model(x, chosen(case, step, rank)), y) / case.ranks)
        optimizer.step()
    return [serial.weights(model)] * case.ranks


EXERCISE = OnRanks(
    solution=average_used,
    cases=(Case(2, 1, {"experts": 2}), Case(3, 2, {"experts": 3}), Case(4, 3, {"experts": 4})),
    play=play,
    expected=expected,
    result="weights after 4 steps",
    budgets=(
        Budget(
            "collectives in a step", lambda s: collectives(s) / STEPS, lambda case: 5 + 2 * case["experts"]
        ),
    ),
    after="02-data-parallel",
    place=100,
    start="A rank does not know what the others have used. Let it say so: one number for each parameter, 1 where "
    "there is a gradient and 0 where there is none, summed over ranks. What does a sum of 0 mean, and what one in "
    "between?",
    mistakes=(
        Mistake(
            "skips-what-it-has-not",
            (
                "Which all-reduce does each rank call next, if one of them leaves one out?",
                "Collectives match by their order. A rank that skips a parameter is one all-reduce ahead: its next "
                "gradient meets another parameter's on the other ranks. Either all ranks send a parameter, or none.",
                "Ask first, with one all-reduce, how many ranks have used each parameter; where some have, a rank "
                "without a gradient sends zeros.",
            ),
            """
            def average_used(ctx: mk.Context, parameters: list[nn.Parameter]) -> None:
                for parameter in parameters:
                    if parameter.grad is not None:
                        ctx.comm.all_reduce(parameter.grad, op="mean")
            """,
            when=lambda seen: seen.hang or seen.mismatch,
        ),
        Mistake(
            "asks-nothing",
            (
                "Your program has to sum something that is not there. What is `parameter.grad` of a layer that was "
                "not used?",
                "It is None. The other ranks may have used the layer, and wait for this rank: it takes part with "
                "zeros, `torch.zeros_like(parameter)`.",
            ),
            """
            def average_used(ctx: mk.Context, parameters: list[nn.Parameter]) -> None:
                for parameter in parameters:
                    ctx.comm.all_reduce(parameter.grad, op="mean")
            """,
            when=lambda seen: "NoneType" in seen.error,
        ),
        Mistake(
            "zeros-for-everybody",
            (
                "A parameter that no rank has used has moved. Who moved it?",
                "The optimizer: a gradient of zeros still lets momentum and weight decay act. In serial training that "
                "gradient is None, and the optimizer leaves the parameter alone.",
                "Find out which parameters no rank has used (an all-reduce of flags), and leave their gradient None.",
            ),
            """
            def average_used(ctx: mk.Context, parameters: list[nn.Parameter]) -> None:
                for parameter in parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    ctx.comm.all_reduce(parameter.grad, op="mean")
            """,
        ),
        Mistake(
            "a-mean-over-its-users",
            (
                "By how many do you divide the gradient of a parameter that one rank out of two has used?",
                "The loss is a mean over all samples, also over those that did not go through this layer; for them the "
                "gradient is zero, and zeros count. Divide by the number of ranks, not by that of its users.",
            ),
            [
                (
                    'ctx.comm.all_reduce(parameter.grad, op="mean")',
                    "ctx.comm.all_reduce(parameter.grad).div_(count)",
                )
            ],
        ),
        Mistake(
            "summed-not-averaged",
            (
                "Which factor is between your gradients and the right ones?",
                "all_reduce adds up; asked for is the mean over ranks, zeros included.",
            ),
            [(', op="mean"', "")],
        ),
    ),
    otherwise=(
        "Take 2 ranks and one layer that rank 1 has not used. What does each rank call, in which order? Then the "
        "same for a layer that nobody has used.",
    ),
)
