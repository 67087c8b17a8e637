"""Ring attention.

Each rank has the queries, keys and values of a part of the sequence, and each of its queries looks at the keys of all
parts. Gathering these would need memory for the whole sequence. So let them go round: a block of keys and values at a
time, from rank to rank, while each rank keeps its queries and adds up what it has seen.

A softmax over blocks that come one by one is possible: keep for each query the largest score so far, m, the sum of
exp(score - m), and the sum of exp(score - m) times the values. If a new block has a larger score, shrink both sums:

    m'  = max(m, largest score of the block)
    sum = sum exp(m - m') + sum over the block of exp(score - m')           values likewise; in the end values / sum

Attention is causal: a query looks at no key that comes after it in the *whole* sequence. Rank r has positions
r s/n to (r+1) s/n - 1. Only the forward is asked for; the backward goes round in the same way.

Budgets per rank: n-1 blocks sent, as 2(n-1) messages at most, and no collectives; and memory for 12 tensors as large
as a block of keys and values (the scores of one block with another are as large here).

Source: Liu et al. 2023; the online softmax: Milakov and Gimelshein, 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, messages, peak, sent_bytes
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.on_ranks import OnRanks


# %% answer
def ring_attention(ctx: mk.Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention of this rank's queries over the whole sequence, [b, heads, s/n, d].

    q, k, v: [b, heads, s/n, d], of this rank's part of the sequence. Scores are q·k / sqrt(d).
    """
    n, r = ctx.world_size, ctx.rank
    ### BEGIN SOLUTION
    before, after = (r - 1) % n, (r + 1) % n
    length = q.shape[2]
    at = torch.arange(length)
    largest = torch.full(q.shape[:3], -torch.inf, dtype=q.dtype)
    total, values = torch.zeros_like(largest), torch.zeros_like(q)
    block, works = torch.stack([k, v]), []
    for step in range(n):
        owner = (r - step) % n
        coming = torch.empty_like(block)
        if step < n - 1:
            works = [ctx.comm.irecv(coming, before), ctx.comm.isend(block, after)]
        # this block's scores
        k, v = block
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        future = (owner * length + at)[None, :] > (r * length + at)[:, None]
        scores = scores.masked_fill(future, -torch.inf)
        # added to what was seen so far
        new = torch.maximum(largest, scores.amax(-1))
        shrink, weights = (largest - new).exp(), (scores - new[..., None]).exp()
        total = total * shrink + weights.sum(-1)
        values = values * shrink[..., None] + weights @ v
        largest = new
        for work in works:
            work.wait()
        works, block = [], coming
    return values / total[..., None]
    ### END SOLUTION


# %% checks
B, HEADS, D = 1, 2, 8
HELD, CALLS = "peak memory of a rank", "collectives"


def length(case: Case) -> int:
    """Return how many tokens of the sequence a rank has."""
    return 12 + 4 * (case.seed % 3)


def block(case: Case) -> int:
    """Return the bytes of a rank's keys and values."""
    return 2 * B * HEADS * length(case) * D * 8


def whole(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of the whole sequence."""
    shape = (3, B, HEADS, length(case) * case.ranks, D)
    q, k, v = torch.randn(shape, generator=case.generator(), dtype=torch.float64)
    return q * case["scale"], k, v


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the attention of this rank's queries."""
    assert callable(answer)
    parts = [each.chunk(case.ranks, 2)[ctx.rank].clone() for each in whole(case)]
    with torch.no_grad(), Memory(ctx):
        return answer(ctx, *parts)


def expected(case: Case) -> list[Tensor]:
    """Return the parts of the attention over the whole sequence."""
    y = F.scaled_dot_product_attention(*whole(case), is_causal=True)
    return list(y.chunk(case.ranks, 2))


EXERCISE = OnRanks(
    solution=ring_attention,
    cases=(Case(2, 71, {"scale": 1}), Case(3, 72, {"scale": 300}), Case(4, 73, {"scale": 3})),
    play=play,
    expected=expected,
    result="the attention",
    budgets=(
        Budget(CALLS, collectives, 0),
        Budget("messages that a rank sends", messages, lambda case: 2 * (case.ranks - 1)),
        Budget("bytes that a rank sends", sent_bytes, lambda case: (case.ranks - 1) * block(case), "bytes"),
        Budget(HELD, peak("activations", "buffers"), lambda case: 12 * block(case), "bytes"),
    ),
    after="14-long-sequences",
    place=10,
    start="Write the online softmax without ranks first: cut k and v into blocks, and take one after the other. Then "
    "replace the next block by one that arrives from the rank before.",
    mistakes=(
        Mistake(
            "all-send-first",
            (
                "Every rank waits in a send. Who is to receive?",
                "In a ring all send and receive at the same time: start one of the two with `irecv` or `isend`, and "
                "wait for it after the other.",
                "`arriving = ctx.comm.irecv(coming, before)`, then `isend`, then compute, then wait for both.",
            ),
            [
                (
                    "works = [ctx.comm.irecv(coming, before), ctx.comm.isend(block, after)]",
                    "ctx.comm.send(block, after)\n            ctx.comm.recv(coming, before)",
                ),
            ],
            when=lambda seen: seen.hang,
        ),
        Mistake(
            "gathers-the-sequence",
            (
                "How much memory does your attention need when the sequence gets longer, with a rank for each part?",
                "All keys and values on every rank is what a ring avoids: it needs two blocks at a time, the one that "
                "is being used and the one that is coming.",
            ),
            """
            def ring_attention(ctx: mk.Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                n, r = ctx.world_size, ctx.rank
                k, v = (torch.cat(ctx.comm.all_gather(each).chunk(n), 2) for each in (k, v))
                mask = torch.ones(q.shape[2], k.shape[2]).tril(r * q.shape[2]).bool()
                return F.scaled_dot_product_attention(q, k, v, mask)
            """,
            when=lambda seen: seen.budget == CALLS,
        ),
        Mistake(
            "collects-all-blocks",
            (
                "What does a rank hold when the last block has come?",
                "You keep every block, and take one softmax in the end: memory for the whole sequence. The online "
                "softmax needs each block once, and then three sums.",
            ),
            """
            def ring_attention(ctx: mk.Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                n, r = ctx.world_size, ctx.rank
                blocks = {r: torch.stack([k, v])}
                for step in range(n - 1):
                    coming = torch.empty_like(blocks[r])
                    arriving = ctx.comm.irecv(coming, (r - 1) % n)
                    ctx.comm.send(blocks[(r - step) % n], (r + 1) % n)
                    arriving.wait()
                    blocks[(r - step - 1) % n] = coming
                k, v = torch.cat([blocks[i] for i in range(n)], 3)
                mask = torch.ones(q.shape[2], k.shape[2]).tril(r * q.shape[2]).bool()
                scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
                return scores.softmax(-1) @ v
            """,
            when=lambda seen: seen.budget == HELD,
        ),
        Mistake(
            "no-maximum",
            (
                "Look at the case with large scores. What is exp(1000)?",
                "exp overflows, and inf / inf is nan. Subtract the largest score so far, and shrink the sums when it "
                "grows.",
            ),
            [
                ("new = torch.maximum(largest, scores.amax(-1))", "new = torch.zeros_like(largest)"),
                ("shrink, weights = (largest - new).exp()", "shrink, weights = torch.ones_like(largest)"),
            ],
        ),
        Mistake(
            "sums-not-shrunk",
            (
                "When the largest score grows, on which scale are the sums of the blocks before?",
                "They are sums of exp(score - m) with the old m. Multiply both by exp(m - m') before you add.",
                "`shrink = (largest - new).exp()`; `total * shrink + ...`, `values * shrink[..., None] + ...`",
            ),
            [("total * shrink", "total"), ("values * shrink[..., None]", "values")],
        ),
        Mistake(
            "values-not-shrunk",
            (
                "The sum of the weights is right. Is the sum of the values on the same scale?",
                "Both sums are of exp(score - m): both have to be shrunk when m grows.",
            ),
            [("values * shrink[..., None]", "values")],
        ),
        Mistake(
            "mask-within-the-block",
            (
                "Query 0 of rank 1: is key 5 of rank 0 before or after it?",
                "Which key is in the future is a question of positions in the whole sequence: a block of an earlier "
                "rank is all past, of a later rank all future, and only a rank's own block is a triangle.",
                "`(owner * length + at)[None, :] > (r * length + at)[:, None]`, and the owner is (r - step) % n.",
            ),
            [("(owner * length + at)[None, :] > (r * length + at)[:, None]", "at[None, :] > at[:, None]")],
        ),
        Mistake(
            "the-other-way-round",
            (
                "Whose block does a rank have after one step, if blocks go from r to r + 1?",
                "That of the rank before it: after `step` steps it is (r - step) % n.",
            ),
            [("owner = (r - step) % n", "owner = (r + step) % n")],
        ),
        Mistake(
            "not-scaled",
            (
                "By what are scores divided before the softmax?",
                "By the square root of the width d of a head.",
            ),
            [(" / q.shape[-1] ** 0.5", "")],
        ),
    ),
    otherwise=(
        "Compare with `F.scaled_dot_product_attention(..., is_causal=True)` of the whole sequence: is rank 0's part "
        "right? It needs its own block only.",
    ),
)
