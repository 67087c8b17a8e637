"""Gradients of experts under data parallelism."""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import collectives, payload
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def average_gradients(ctx: mk.Context, shared: list[Tensor], experts: list[Tensor], ep: int) -> None:
    """Make all gradients those of the mean loss over all ranks, in place.

    shared: gradients of parameters that every rank has, of this rank's tokens.
    experts: gradients of this rank's experts, of all tokens that were sent to them.
    """
    n = ctx.world_size
    ### BEGIN SOLUTION
    groups = [ctx.comm.group(range(first, n, ep)) for first in range(ep)]
    for comm, gradients in ((ctx.comm, shared), (groups[ctx.rank % ep], experts)):
        flat = comm.all_reduce(torch.cat([gradient.flatten() for gradient in gradients])) / n
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
    ### END SOLUTION


# %% checks
CALLS, SENT = "collectives", "bytes of collectives"
SHARED, EXPERT = ((5, 3), (7,)), ((4, 3), (2, 4))


def of_tokens(case: Case, rank: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return the gradients of a rank's mean loss: of the shared parameters, and of each part of the experts."""
    generator = case.generator(rank)

    def draw(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
        return [torch.randn(shape, generator=generator, dtype=torch.float64) + rank for shape in shapes]

    return draw(SHARED), [draw(EXPERT) for _ in range(case["ep"])]


def given(case: Case, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a rank has after its backward: its experts have had the tokens of all ranks of its group."""
    ep = case["ep"]
    group = range(rank - rank % ep, rank - rank % ep + ep)
    parts = [of_tokens(case, other)[1][rank % ep] for other in group]
    return of_tokens(case, rank)[0], [torch.stack(each).sum(0) for each in zip(*parts, strict=True)]


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return this rank's gradients after the answer."""
    shared, experts = given(case, ctx.rank)
    answer(ctx, list(shared), list(experts), case["ep"])  # in place: into the tensors, not into the lists
    return {"shared": shared, "experts": experts}


def expected(case: Case) -> list[dict[str, object]]:
    """Average over the ranks' losses, parameter by parameter."""
    every = [of_tokens(case, rank) for rank in range(case.ranks)]
    shared = [torch.stack(each).mean(0) for each in zip(*(mine for mine, _ in every), strict=True)]
    parts = [
        [torch.stack(each).mean(0) for each in zip(*(experts[part] for _, experts in every), strict=True)]
        for part in range(case["ep"])
    ]
    return [{"shared": shared, "experts": parts[rank % case["ep"]]} for rank in range(case.ranks)]


NUMBERS = sum(torch.Size(shape).numel() for shape in SHARED + EXPERT)

EXERCISE = OnRanks(
    solution=average_gradients,
    cases=(Case(4, 95, {"ep": 2}), Case(3, 96, {"ep": 3}), Case(6, 97, {"ep": 2})),
    play=play,
    expected=expected,
    result="gradients",
    budgets=(Budget(CALLS, collectives, 2), Budget(SENT, payload, 8 * NUMBERS, "bytes")),
    after="15-experts",
    place=40,
    when={"a-collective-a-gradient": lambda seen: seen.budget == CALLS},
)
