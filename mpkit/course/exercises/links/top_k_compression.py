"""Gradient compression: top-k with error feedback."""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.equal import difference
from mpkit.course.framework.exercise import Answer, Budget, Case
from mpkit.course.framework.measures import messages, payload
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
class TopK:
    """Averages gradients over all ranks, of which each sends its k largest entries."""

    def __init__(self, ctx: mk.Context, length: int, k: int) -> None:
        ### BEGIN SOLUTION
        self.ctx = ctx
        self.k = k
        self.residual = torch.zeros(length)
        ### END SOLUTION

    def average(self, gradient: Tensor) -> Tensor:
        """Return the mean of what all ranks send, [length].

        gradient: [length], fp32, of this rank; it is not to be changed.
        """
        ### BEGIN SOLUTION
        accumulated = gradient + self.residual
        places = accumulated.abs().topk(self.k).indices
        values = accumulated[places]
        self.residual = accumulated.index_fill(0, places, 0.0)
        sent = [self.ctx.comm.all_gather(each) for each in (places, values)]
        total = torch.zeros_like(gradient).index_add_(0, *sent)
        return total / self.ctx.world_size
        ### END SOLUTION


# %% checks
STEPS = 4
SENT = "bytes of collectives"


def length(case: Case) -> int:
    """Return the length of a gradient."""
    return 30 + 5 * case.ranks


def kept(case: Case) -> int:
    """Return k, how many of its entries a rank sends."""
    return 2 + case.ranks


def gradients(case: Case, rank: int) -> list[Tensor]:
    """Return a rank's gradients: its own noise, and something that all ranks share."""
    common = torch.randn(length(case), generator=case.generator(99))
    noise = torch.randn(STEPS, length(case), generator=case.generator(rank))
    return list(common + 0.7 * noise)


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the result of each step, and whether the gradients are as they were."""
    compressed = answer(ctx, length(case), kept(case))
    mine = gradients(case, ctx.rank)
    results = [compressed.average(gradient) for gradient in mine]
    return {"averages": results, "gradients": mine}


def expected(case: Case) -> list[dict[str, list[Tensor]]]:
    """Return the same, computed for all ranks in one place, entry by entry."""
    residuals = [[0.0] * length(case) for _ in range(case.ranks)]
    given = [gradients(case, rank) for rank in range(case.ranks)]
    averages = []
    for step in range(STEPS):
        total = torch.zeros(length(case), dtype=torch.float64)
        for rank, residual in enumerate(residuals):
            whole = [g + e for g, e in zip(given[rank][step].tolist(), residual, strict=True)]
            sizes = [abs(each) for each in whole]
            largest = sorted(range(length(case)), key=sizes.__getitem__)[-kept(case) :]
            for i in largest:
                total[i] += whole[i]
            residuals[rank] = [0.0 if i in largest else value for i, value in enumerate(whole)]
        averages.append(total / case.ranks)
    return [{"averages": averages, "gradients": given[rank]} for rank in range(case.ranks)]


EXERCISE = OnRanks(
    solution=TopK,
    cases=(Case(2, seed=1), Case(3, seed=2), Case(4, seed=3)),
    play=play,
    expected=expected,
    result=f"the averages of {STEPS} steps",
    budgets=(
        Budget(SENT, payload, lambda case: STEPS * 12 * case.ranks * kept(case), "bytes"),
        Budget("messages that a rank sends", messages, 0),
    ),
    after="13-links-and-collectives",
    place=50,
    when={
        "sends-zeros-too": lambda seen: seen.budget == SENT,
        "changes-the-gradient": lambda seen: (
            seen.got and difference(seen.expected[0]["averages"], seen.got[0]["averages"]) is None
        ),
    },
)
