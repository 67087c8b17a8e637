"""An embedding with a divided vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.exercises.tensor_parallel import operator
from mpkit.course.framework.exercise import Answer, Budget, Case
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


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the embeddings, and the gradient of this rank's rows."""
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
    when={
        "gathers-the-table": lambda seen: seen.budget,
        "tokens-not-shifted": lambda seen: "index" in seen.error and seen.case["parts"] == "equal",
        "one-row-too-many": lambda seen: "index" in seen.error and seen.case["parts"] == "unequal",
    },
)
