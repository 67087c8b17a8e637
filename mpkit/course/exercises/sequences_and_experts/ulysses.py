"""Ulysses: all-to-all between sequence and heads.

Each rank has a part of the sequence, with all heads. Attention wants it the other way round: the whole sequence, of a
part of the heads, since heads do not look at each other. One all-to-all turns the one into the other, and a second one
turns the result back:

    [b, s/n, H, d]  ── all-to-all ──▶  [b, s, H/n, d]  ── attention ──▶  ── all-to-all ──▶  [b, s/n, H, d]

`exchange(ctx, x)` (given above) cuts x into n parts along its *first* dimension, sends part j to rank j, and returns
the parts that come, in the order of the ranks; it has a gradient. So first make the n parts: which heads go to rank j?
And put together what comes: whose part of the sequence is it?

The first H/n heads go to rank 0, and rank r has the r-th part of the sequence. n divides both. Attention is causal.

Budget, forward and backward together: 8 all-to-alls (queries, keys, values, result), each as large as this rank's part.

Source: Jacobs et al. 2023, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.exercises.sequences_and_experts import exchange
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, payload
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def ulysses(ctx: mk.Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention of this rank's part of the sequence over all of it, [b, s/n, H, d].

    q, k, v: [b, s/n, H, d], of this rank's part of the sequence. (F.scaled_dot_product_attention takes [b, H, s, d].)
    """
    n = ctx.world_size
    ### BEGIN SOLUTION
    whole = []
    for x in (q, k, v):
        parts = torch.stack(x.chunk(n, 2))  # [n, b, s/n, H/n, d], by heads
        came = exchange(ctx, parts)  # [n, b, s/n, H/n, d], by sequence
        whole.append(torch.cat(list(came), 1).transpose(1, 2))  # [b, H/n, s, d]
    y = F.scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True).transpose(1, 2)
    parts = torch.stack(y.chunk(n, 1))  # by sequence
    return torch.cat(list(exchange(ctx, parts)), 2)  # by heads
    ### END SOLUTION


# %% checks
B, LENGTH, D = 2, 3, 4
CALLS, SENT = "collectives, of forward and backward together", "bytes of collectives"


def whole(case: Case) -> tuple[list[Tensor], Tensor]:
    """Return queries, keys and values of the whole sequence, and the gradient of the result."""
    shape = (4, B, LENGTH * case.ranks, case["heads"], D)
    *inputs, dy = torch.randn(shape, generator=case.generator(), dtype=torch.float64)
    return inputs, dy


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the attention, and the gradients of this rank's queries, keys and values."""
    assert callable(answer)
    inputs, dy = whole(case)
    mine = [x.chunk(case.ranks, 1)[ctx.rank].clone().requires_grad_() for x in inputs]
    y = answer(ctx, *mine)
    y.backward(dy.chunk(case.ranks, 1)[ctx.rank])
    return {
        "result": y.detach(),
        **{f"gradient of {name}": x.grad for name, x in zip("qkv", mine, strict=True)},
    }


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return the parts of the attention over the whole sequence, and of its gradients."""
    inputs, dy = whole(case)
    inputs = [x.clone().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in inputs)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    grads = torch.autograd.grad(y, inputs, dy)
    named = {"result": y.detach(), **{f"gradient of {name}": x for name, x in zip("qkv", grads, strict=True)}}
    return [{name: x.chunk(case.ranks, 1)[rank] for name, x in named.items()} for rank in range(case.ranks)]


EXERCISE = OnRanks(
    solution=ulysses,
    cases=(Case(2, 81, {"heads": 2}), Case(2, 82, {"heads": 6}), Case(4, 83, {"heads": 4})),
    play=play,
    expected=expected,
    result="the attention and its gradients",
    budgets=(
        Budget(CALLS, collectives, 8),
        Budget(SENT, payload, lambda case: 8 * B * LENGTH * case["heads"] * D * 8, "bytes"),
    ),
    after="14-long-sequences",
    place=20,
    start="Do it for q only: `torch.stack(q.chunk(n, 2))` has the n groups of heads along its first dimension. What "
    "does `exchange` of that hold, and along which dimension do the parts follow one another?",
    mistakes=(
        Mistake(
            "sends-all-heads-to-everybody",
            (
                "The result is right. How much of what a rank receives does it use?",
                "You send all heads to every rank, and each throws most of them away: that is an all-gather. Part j "
                "of what you exchange needs only rank j's heads.",
                "`torch.stack(x.chunk(n, 2))`: n parts along the first dimension, by heads.",
            ),
            [
                ("torch.stack(x.chunk(n, 2))", "torch.stack([x] * n)"),
                ("torch.cat(list(came), 1)", "torch.cat(list(came), 1).chunk(n, 2)[ctx.rank]"),
            ],
            when=lambda seen: seen.budget == SENT,
        ),
        Mistake(
            "only-its-own-part",
            (
                "What does a query of rank 1 know of the keys of rank 0?",
                "Without an exchange attention stays within a rank's part of the sequence.",
            ),
            """
            def ulysses(ctx: mk.Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            """,
        ),
        Mistake(
            "no-way-back",
            (
                "Which shape does your result have, and which was asked for?",
                "After attention a rank has the whole sequence of its heads. A second exchange, by sequence this time, "
                "gives everybody their own part with all heads.",
                "`torch.cat(list(exchange(ctx, torch.stack(y.chunk(n, 1)))), 2)`",
            ),
            [("torch.cat(list(exchange(ctx, parts)), 2)", "torch.cat(list(parts), 1)")],
            when=lambda seen: ("shape" in seen.error or "size" in seen.error) and seen.where == "",
        ),
        Mistake(
            "cuts-the-numbers-not-the-heads",
            (
                "`reshape` cuts the tensor as its numbers lie in memory. Which dimension is outermost there?",
                "Heads are the third dimension. `x.chunk(n, 2)` cuts along it; `reshape` cuts the batch.",
            ),
            [("torch.stack(x.chunk(n, 2))", "x.reshape(n, x.shape[0], x.shape[1], -1, x.shape[3])")],
        ),
        Mistake(
            "sequence-in-the-wrong-order",
            (
                "Rank 0 has positions 0, 1, 2 and rank 1 has 3, 4, 5. In which order are they in your whole sequence?",
                "The parts follow one another; they are not woven into each other. For causal attention the order "
                "matters.",
                "`torch.cat(list(came), 1)`",
            ),
            [("torch.cat(list(came), 1)", "torch.stack(list(came), 2).flatten(1, 2)")],
        ),
        Mistake(
            "heads-in-the-wrong-order",
            (
                "Attention is right, up to the order of the heads. Which heads come from rank 1?",
                "The parts that come back are groups of heads that follow one another: join them, do not weave them.",
                "`torch.cat(list(exchange(ctx, parts)), 2)`",
            ),
            [
                (
                    "torch.cat(list(exchange(ctx, parts)), 2)",
                    "torch.stack(list(exchange(ctx, parts)), 3).flatten(2, 3)",
                )
            ],
        ),
        Mistake(
            "attention-between-heads",
            (
                "Which dimension does `F.scaled_dot_product_attention` take for the sequence?",
                "The last but one. What you give it has heads there: each position attends to heads instead of to "
                "positions. `transpose(1, 2)` before, and again after.",
            ),
            [
                ("torch.cat(list(came), 1).transpose(1, 2)", "torch.cat(list(came), 1)"),
                ("is_causal=True).transpose(1, 2)", "is_causal=True)"),
            ],
        ),
        Mistake(
            "no-gradient",
            (
                "What does autograd know of `ctx.comm.all_to_all`?",
                "Nothing: what comes out of it has no history. `exchange` is the one with a gradient.",
            ),
            [("exchange(ctx, parts)", "ctx.comm.all_to_all(parts.detach().contiguous())")],
            when=lambda seen: "does not require grad" in seen.error,
        ),
    ),
    otherwise=(
        "Give q the numbers of its positions, and look at what each rank has after the first exchange.",
    ),
)
