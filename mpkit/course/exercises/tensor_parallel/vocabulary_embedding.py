"""An embedding with a divided vocabulary.

The first layer of a language model is as large as the last: V rows of h numbers, one row per token of the vocabulary.
Each rank has the rows of its part, [V_i, h], beginning with token `start`; every rank sees all tokens of the batch. A
rank looks up the tokens that are in its part, and puts zeros where a token is in another rank's. The sum over all ranks
then has every token's row, because exactly one rank had it:

    tokens         [  5    0    7  ]         4 rows per rank, so rank 0 has tokens 0 to 3, rank 1 has 4 to 7
    rank 0         [  0   E[0]  0  ]
    rank 1         [ E[5]  0   E[7] ]        the sum is the same on both, and no table was sent

`g(ctx, y)` is the sum of all ranks' y, with a gradient. The ranks' parts need not be of equal size.

Budget: one collective, forward and backward together, of tokens x h numbers.

Source: Shoeybi et al. 2019, section 3, the end.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.exercises.tensor_parallel import operator
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, payload
from mpkit.course.framework.on_ranks import OnRanks


# %% given
def g(ctx: mk.Context, y: Tensor) -> Tensor:
    """Apply Megatron's g: an all-reduce in the forward, the identity in the backward."""
    return operator(y, lambda y: ctx.comm.all_reduce(y), lambda dy: dy)


# %% answer
def embed(ctx: mk.Context, tokens: Tensor, table: Tensor, start: int) -> Tensor:
    """Return the embedding of each token, [b, s, h]: the same on every rank.

    tokens: [b, s], numbers in the whole vocabulary, the same on every rank.
    table: [V_i, h], the rows of this rank's tokens, of which the first is token number `start`; needs a gradient.
    """
    ### BEGIN SOLUTION
    here = (tokens >= start) & (tokens < start + len(table))
    rows = F.embedding(torch.where(here, tokens - start, 0), table)
    return g(ctx, torch.where(here[..., None], rows, 0.0))
    ### END SOLUTION


# %% checks
B, S, H = 2, 5, 4
SENT = "bytes of collectives"


def whole(case: Case) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return the tokens, the table, the gradient of the result, and the first token of each rank, with V at the end."""
    generator = case.generator(5)
    starts = [0]
    for rank in range(case.ranks):
        starts.append(starts[-1] + 3 + (rank if case["parts"] == "unequal" else 0))
    table = torch.randn(starts[-1], H, generator=generator, dtype=torch.float64)
    tokens = torch.randint(starts[-1], (B, S), generator=generator)
    tokens[0, 0], tokens[0, 1], tokens[1, 0] = (
        0,
        starts[-1] - 1,
        0,
    )  # the first, the last, and one that comes twice
    if case["parts"] == "equal":
        tokens[tokens == starts[1]] = 0
    else:
        tokens[1, 1] = starts[1]  # the first of the second rank
    return tokens, table, torch.randn(B, S, H, generator=generator, dtype=torch.float64), starts


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the embeddings, and the gradient of this rank's rows."""
    assert callable(answer)
    tokens, table, dy, starts = whole(case)
    mine = table[starts[ctx.rank] : starts[ctx.rank + 1]].clone().requires_grad_()
    y = answer(ctx, tokens, mine, starts[ctx.rank])
    y.backward(dy)
    return {"result": y.detach(), "gradient of the table": mine.grad}


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the results of the whole table on one rank."""
    tokens, table, dy, starts = whole(case)
    y = F.embedding(tokens, table.requires_grad_())
    (grad,) = torch.autograd.grad(y, table, dy)
    return [
        {"result": y.detach(), "gradient of the table": grad[starts[rank] : starts[rank + 1]]}
        for rank in range(case.ranks)
    ]


EXERCISE = OnRanks(
    solution=embed,
    cases=(
        Case(2, seed=61, sizes={"parts": "equal"}),
        Case(3, seed=62, sizes={"parts": "unequal"}),
        Case(4, seed=63, sizes={"parts": "unequal"}),
    ),
    play=play,
    expected=expected,
    result="embeddings and gradient",
    budgets=(
        Budget("collectives, of forward and backward together", collectives, 1),
        Budget(SENT, payload, B * S * H * 8, "bytes"),
    ),
    after="06-tensor-parallel",
    place=45,
    start="Which tokens are in this rank's part? `here = (tokens >= start) & (tokens < start + len(table))`. Look up "
    "`tokens - start` where that is so, and any valid row where it is not; then put zeros there.",
    mistakes=(
        Mistake(
            "gathers-the-table",
            (
                "How many numbers travel, and how many are in the rows that the batch needs?",
                "You put the whole table together on every rank: with a vocabulary of 50,000 that is the largest "
                "tensor of the model, and dividing it was to avoid that. Send the rows of the tokens only.",
                "Each rank's rows, zeros where a token is elsewhere, and g of them.",
            ),
            """
            def embed(ctx: mk.Context, tokens: Tensor, table: Tensor, start: int) -> Tensor:
                lengths = ctx.comm.all_gather(torch.tensor([len(table)])).tolist()
                padded = F.pad(table.detach(), (0, 0, 0, max(lengths) - len(table)))
                parts = list(ctx.comm.all_gather(padded).chunk(len(lengths)))
                parts = [part[:length] for part, length in zip(parts, lengths)]
                parts[ctx.rank] = table
                return F.embedding(tokens, torch.cat(parts))
            """,
            when=lambda seen: seen.budget,
        ),
        Mistake(
            "tokens-not-shifted",
            (
                "Where in this rank's table is the row of token number `start`?",
                "Tokens are numbers in the whole vocabulary, and the first row here is that of token `start`. Look up "
                "`tokens - start`.",
            ),
            [("tokens - start, 0)", "tokens, 0)")],
            when=lambda seen: "index" in seen.error and seen.case["parts"] == "equal",
        ),
        Mistake(
            "no-zeros-for-the-absent",
            (
                "What does a rank add for a token that is in another rank's part?",
                "Some row has to be looked up for it, and that is not the token's. It has to become zeros before the "
                "sum.",
                "`torch.where(here[..., None], rows, 0.0)`",
            ),
            [("torch.where(here[..., None], rows, 0.0)", "rows")],
        ),
        Mistake(
            "parts-of-equal-size",
            (
                "With parts of equal size all is right. Where does this rank's part end?",
                "At `start + len(table)`. Rank times the number of rows is not where the part begins if others have "
                "more or fewer.",
            ),
            [
                (
                    "here = (tokens >= start) & (tokens < start + len(table))",
                    "start = ctx.rank * len(table)\n    here = (tokens >= start) & (tokens < start + len(table))",
                )
            ],
        ),
        Mistake(
            "one-row-too-many",
            (
                "Which token is the first that is *not* in this rank's part?",
                "Token `start + len(table)` is the next rank's first: `<`, not `<=`. There is no row for it here.",
            ),
            [("tokens < start + len(table)", "tokens <= start + len(table)")],
            when=lambda seen: "index" in seen.error and seen.case["parts"] == "unequal",
        ),
        Mistake(
            "no-sum-over-ranks",
            (
                "Is the result the same on every rank?",
                "Each rank has the rows of its own tokens, and zeros. The whole is the sum: g.",
            ),
            [("g(ctx, torch.where(here[..., None], rows, 0.0))", "torch.where(here[..., None], rows, 0.0)")],
        ),
        Mistake(
            "gradient-summed-over-ranks",
            (
                "The result is right. By which factor is the gradient of the table too large?",
                "Every rank computes the same loss from the same result, so each has the whole gradient of it "
                "already. In the backward of the sum there is nothing to add up: g is the identity there.",
                "Use g as it is given, and no collective for the gradient.",
            ),
            [
                (
                    "g(ctx, torch.where(here[..., None], rows, 0.0))",
                    "operator(torch.where(here[..., None], rows, 0.0), ctx.comm.all_reduce, ctx.comm.all_reduce)",
                )
            ],
        ),
    ),
    otherwise=(
        "Compare with `F.embedding` of the whole table: which tokens are wrong, and whose part are they in?",
    ),
)
