"""Gradient compression: top-k with error feedback.

Of a gradient's numbers few are large. Send only those: the k of largest magnitude, with their places. What is not sent
is not lost, it is kept on the rank (the *residual*) and added to the next gradient: so a small gradient that always
points the same way gets its turn. Without this error feedback, training ends up elsewhere.

In each step, rank r with gradient g and residual e (zeros in the beginning):

    1. a = g + e
    2. take the k entries of a with the largest magnitude; the residual is a with those set to 0
    3. all ranks exchange their k values and k places. The result is the sum of what all of them sent, at its places,
       over n

Write the class `TopK`: `average(gradient)` returns the result, dense, the same on every rank. Places of two ranks may
be the same, and then both values count. `torch.topk` finds the places (no two magnitudes are equal here).

Budget per step and rank: all-gathers only, of together 12nk bytes: k fp32 values and k int64 places of n ranks.

Sources: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; Lin et al., "Deep
Gradient Compression", ICLR 2018; Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.framework.equal import difference
from mpkit.course.framework.exercise import Budget, Case, Mistake
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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the result of each step, and whether the gradients are as they were."""
    assert callable(answer)
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
    start="`__init__` keeps `ctx`, `k` and a residual of zeros. Then `average`: first add the residual, then find the "
    "places with `topk` of the magnitudes, then all-gather values and places.",
    mistakes=(
        Mistake(
            "sends-zeros-too",
            (
                "The averages are right. How many numbers does each rank send?",
                "A dense tensor of mostly zeros has as many bytes as a full one. Send the k values and their k "
                "places: two "
                "all-gathers.",
            ),
            [
                (
                    "        sent = [self.ctx.comm.all_gather(each) for each in (places, values)]\n"
                    "        total = torch.zeros_like(gradient).index_add_(0, *sent)\n",
                    "        total = self.ctx.comm.all_reduce(accumulated - self.residual)\n",
                )
            ],
            when=lambda seen: seen.budget == SENT,
        ),
        Mistake(
            "no-error-feedback",
            (
                "The first step is right, the second is not. What has become of the entries that were not sent?",
                "They are lost. Keep what was not sent, and add it to the next gradient.",
            ),
            [("accumulated = gradient + self.residual", "accumulated = gradient.clone()")],
        ),
        Mistake(
            "keeps-what-it-sent",
            (
                "The first step is right. In the second, which entries are too large?",
                "Those that were sent: they are in the residual still, and count again. Set them to 0 in it.",
            ),
            [("accumulated.index_fill(0, places, 0.0)", "accumulated")],
        ),
        Mistake(
            "the-gradient-s-rest-only",
            (
                "Two steps are right, the third is not. What was in the residual that was not sent again?",
                "The residual is what is left of gradient *plus* residual. With that of the gradient alone, "
                "what waits for "
                "two steps is forgotten.",
            ),
            [("accumulated.index_fill(0, places, 0.0)", "gradient.index_fill(0, places, 0.0)")],
        ),
        Mistake(
            "largest-not-largest-magnitude",
            (
                "Is any of the entries that you send negative?",
                "A large negative gradient is large: take the `topk` of `accumulated.abs()`, and then the "
                "values with their "
                "signs.",
            ),
            [("accumulated.abs().topk", "accumulated.topk")],
        ),
        Mistake(
            "loses-the-signs",
            (
                "Which signs do the entries have that you send?",
                "`topk` of the magnitudes gives magnitudes. Take its `.indices`, and the values from `accumulated` "
                "itself.",
            ),
            [("values = accumulated[places]", "values = accumulated[places].abs()")],
        ),
        Mistake(
            "one-of-two-survives",
            (
                "At which places is the average too small? How many ranks sent something there?",
                "An assignment to places that occur twice keeps one of the values. Add: `index_add_` or "
                "`scatter_add_`.",
            ),
            [
                (
                    "total = torch.zeros_like(gradient).index_add_(0, *sent)",
                    "total = torch.zeros_like(gradient).index_copy_(0, *sent)",
                )
            ],
        ),
        Mistake(
            "summed-not-averaged",
            (
                "By which factor are the averages wrong, on 2 ranks and on 3?",
                "All ranks' entries are added up: divide by `ctx.world_size`. (By all of them, also where only "
                "one rank "
                "sent something.)",
            ),
            [("return total / self.ctx.world_size", "return total")],
        ),
        Mistake(
            "changes-the-gradient",
            (
                "The averages are right. Is the gradient that you were given what it was?",
                "`gradient += ...` changes the caller's tensor. Make a new one: `gradient + self.residual`.",
            ),
            [
                ("accumulated = gradient + self.residual", "accumulated = gradient.add_(self.residual)"),
            ],
            when=lambda seen: (
                seen.got and difference(seen.expected[0]["averages"], seen.got[0]["averages"]) is None
            ),
        ),
    ),
    otherwise=(
        "Print places and values on each rank in the first step, and add them up by hand.",
        "If the first step is right and a later one is not, look at the residual.",
    ),
)
