"""A mixture of experts.

In place of one MLP a layer has n experts, rank r has expert r, and each token goes to the one expert that scores it
highest. That needs two all-to-alls: tokens to their experts, and results back.

Messages have to be of a known size. So an expert has room for `capacity` tokens from each rank: a buffer of
n x capacity rows, `capacity` for each expert, zeros where a place stays free. If more of a rank's tokens choose an
expert, the first ones (in the order of the tokens) have it, and the rest are *dropped*: their result is zero, and in a
transformer the residual connection carries them past the layer.

    token      0   1   2   3   4            capacity 2, 2 ranks
    expert     1   0   1   1   0            token 3 is dropped
    buffer   [ 1   4 | 0   2 ]              part 0 goes to rank 0, part 1 to rank 1

A token's result is its expert's output times the probability that the softmax of its scores gives to that expert:
through it the scores get a gradient. `exchange(ctx, x)`, given above, is the all-to-all.

Budget, forward and backward together: 4 all-to-alls, of n x capacity rows each.

Source: Fedus et al. 2022, section 2 (one expert per token); Lepikhin et al. 2021 (capacity, all-to-all).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.exercises.sequences_and_experts import exchange
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, payload
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.serial import fill


# %% answer
def mixture(ctx: mk.Context, x: Tensor, scores: Tensor, expert: nn.Module, capacity: int) -> Tensor:
    """Return the results of this rank's tokens, [tokens, h]; zeros for those that are dropped.

    x: [tokens, h], this rank's tokens. scores: [tokens, n], of each token for each expert.
    expert: this rank's expert, number ctx.rank; takes and gives [any number of rows, h].
    capacity: the most tokens that one rank sends to one expert.
    """
    n = ctx.world_size
    ### BEGIN SOLUTION
    # choose
    probability, chosen = scores.softmax(-1).max(-1)
    place = (
        F.one_hot(chosen, n).cumsum(0).gather(1, chosen[:, None])[:, 0] - 1
    )  # among those that chose the same
    kept = (place < capacity).nonzero()[:, 0]
    slot = chosen[kept] * capacity + place[kept]
    # to the experts
    buffer = x.new_zeros(n * capacity, x.shape[1]).index_copy(0, slot, x[kept])
    results = expert(exchange(ctx, buffer))
    # and back
    back = exchange(ctx, results)
    y = torch.zeros_like(x).index_copy(0, kept, back[slot])
    return y * probability[:, None]
    ### END SOLUTION


# %% checks
TOKENS = 9
CALLS, SENT = "collectives, of forward and backward together", "bytes of collectives"


def width(case: Case) -> int:
    """Return h, the numbers of a token."""
    return 3 + case.ranks


def expert_of(case: Case, rank: int) -> nn.Module:
    """Return a rank's expert; its bias shows where a free place is taken for a token."""
    h = width(case)
    return fill(nn.Sequential(nn.Linear(h, 2 * h), nn.Tanh(), nn.Linear(2 * h, h)), 10 * case.seed + rank)


def given(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's tokens, their scores, and the gradient of the result."""
    generator = case.generator(rank)
    x, dy = torch.randn(2, TOKENS, width(case), generator=generator, dtype=torch.float64)
    scores = torch.randn(TOKENS, case.ranks, generator=generator, dtype=torch.float64)
    scores[:6, -1] += 2  # more tokens choose the last expert
    return x.requires_grad_(), scores.requires_grad_(), dy


def outcome(y: Tensor, x: Tensor, scores: Tensor, expert: nn.Module) -> dict[str, object]:
    """Return what is compared."""
    parameters = {f"gradient of the expert's {name}": each.grad for name, each in expert.named_parameters()}
    return {
        "result": y.detach(),
        "gradient of x": x.grad,
        "gradient of the scores": scores.grad,
        **parameters,
    }


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the result and the gradients of this rank's tokens, scores and expert."""
    assert callable(answer)
    (x, scores, dy), expert = given(case, ctx.rank), expert_of(case, ctx.rank)
    y = answer(ctx, x, scores, expert, case["capacity"])
    y.backward(dy)
    return outcome(y, x, scores, expert)


def expected(case: Case) -> list[dict[str, object]]:
    """Go through the tokens one by one, with all experts at hand."""
    experts = [expert_of(case, rank) for rank in range(case.ranks)]
    outcomes = []
    for rank in range(case.ranks):
        x, scores, dy = given(case, rank)
        rows, taken = [], [0] * case.ranks
        for token, row in zip(x, scores, strict=True):
            chosen = int(row.argmax())
            taken[chosen] += 1
            fits = taken[chosen] <= case["capacity"]
            rows.append(experts[chosen](token) * row.softmax(0)[chosen] if fits else torch.zeros_like(token))
        y = torch.stack(rows)
        y.backward(dy)
        outcomes.append((y, x, scores))
    return [outcome(*each, expert) for each, expert in zip(outcomes, experts, strict=True)]


EXERCISE = OnRanks(
    solution=mixture,
    cases=(
        Case(2, 91, {"capacity": TOKENS}),
        Case(3, 92, {"capacity": 3}),
        Case(4, 93, {"capacity": 2}),
    ),
    play=play,
    expected=expected,
    result="results and gradients",
    budgets=(
        Budget(CALLS, collectives, 4),
        Budget(SENT, payload, lambda case: 4 * case.ranks * case["capacity"] * width(case) * 8, "bytes"),
    ),
    after="06-tensor-parallel",
    place=30,
    start="First, without ranks: which expert does each token choose (`scores.softmax(-1).max(-1)` has the probability "
    "and the number), and how many tokens before it chose the same one? From the two follows its row in the buffer.",
    mistakes=(
        Mistake(
            "every-token-to-every-expert",
            (
                "The result is right. Of the tokens that an expert receives, for how many was it chosen?",
                "You send all tokens to all experts: n times as much as needed. Part j of the buffer has the tokens "
                "that chose expert j, and no more than `capacity`.",
            ),
            """
            def mixture(ctx: mk.Context, x: Tensor, scores: Tensor, expert: nn.Module, capacity: int) -> Tensor:
                n, tokens = ctx.world_size, len(x)
                probability, chosen = scores.softmax(-1).max(-1)
                place = F.one_hot(chosen, n).cumsum(0).gather(1, chosen[:, None])[:, 0] - 1
                back = exchange(ctx, expert(exchange(ctx, x.repeat(n, 1)))).unflatten(0, (n, tokens))
                mine = back[chosen, torch.arange(tokens)]
                return mine * (probability * (place < capacity))[:, None]
            """,
            when=lambda seen: seen.budget == SENT,
        ),
        Mistake(
            "no-capacity",
            (
                "What happens to the fourth token for an expert with room for three?",
                "Its row in the buffer would be the next expert's first, or lie beyond the end. Tokens whose place is "
                "not below `capacity` are dropped.",
                "`kept = (place < capacity).nonzero()[:, 0]`, and only those rows are filled and read.",
            ),
            [("(place < capacity)", "(place >= 0)")],
            when=lambda seen: "index" in seen.error or "out of" in seen.error,
        ),
        Mistake(
            "no-way-back",
            (
                "Whose results does a rank have after its expert has run?",
                "Those of the tokens that *came*, of all ranks. Its own are elsewhere: a second exchange sends each "
                "result to where its token came from.",
                "`back = exchange(ctx, results)`",
            ),
            [("back = exchange(ctx, results)", "back = results")],
        ),
        Mistake(
            "not-times-the-probability",
            (
                "Look at the gradient of the scores: how do they enter your result?",
                "Which expert is the largest has no gradient. The result is weighted with the probability of the "
                "chosen expert, and that has one.",
            ),
            [("return y * probability[:, None]", "return y")],
        ),
        Mistake(
            "weighted-with-the-score",
            (
                "Are your weights between 0 and 1?",
                "The weight is a probability: the softmax over the scores of *all* experts, at the chosen one.",
            ),
            [("scores.softmax(-1).max(-1)", "scores.max(-1)")],
        ),
        Mistake(
            "drops-the-first",
            (
                "With room for everybody all is right. Which tokens are left out where there is not?",
                "The first ones that choose an expert have the places; you keep the last ones.",
            ),
            [
                (
                    "F.one_hot(chosen, n).cumsum(0)",
                    "F.one_hot(chosen, n).flip(0).cumsum(0).flip(0)",
                )
            ],
        ),
        Mistake(
            "dropped-tokens-share-a-place",
            (
                "What is the result of a token that is dropped?",
                "Zero. You read the last place of its expert, where another token is.",
                "Fill only the rows of the tokens that were kept: `zeros_like(x).index_copy(0, kept, back[slot])`.",
            ),
            [
                (
                    "    y = torch.zeros_like(x).index_copy(0, kept, back[slot])\n",
                    "    y = back[chosen * capacity + place.clamp(max=capacity - 1)]\n",
                )
            ],
        ),
        Mistake(
            "place-in-the-batch",
            (
                "Token 7 is the second that chose expert 0. Which place does it have there?",
                "A place counts the tokens before it that chose *the same* expert, not all tokens before it.",
                "`F.one_hot(chosen, n).cumsum(0)` counts, for each token, those so far for each expert.",
            ),
            [
                (
                    "F.one_hot(chosen, n).cumsum(0).gather(1, chosen[:, None])[:, 0] - 1",
                    "torch.arange(len(x))",
                )
            ],
        ),
    ),
    otherwise=(
        "Print `chosen`, `place` and the buffer on rank 0, with 2 ranks, and compare with the drawing.",
        "If the results are right and some gradient is not: where did you leave autograd?",
    ),
)
