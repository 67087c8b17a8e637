"""Ring attention."""

from mpkit.course.author import *


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
B, HEADS, D = 1, 2, 32
HELD, CALLS = "peak memory of a rank", "collectives"
ELSEWHERE = "messages to a rank that is not a neighbour"


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


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the attention of this rank's queries."""
    parts = [each.chunk(case.ranks, 2)[ctx.rank].clone() for each in whole(case)]
    with torch.no_grad(), Memory(ctx):
        return answer(ctx, *parts)


def count_messages_elsewhere(seen: Seen) -> float:
    """Return how many messages a rank sends to ranks that are not beside it in the ring; the largest number."""
    n = len(seen.ranks)
    return max(
        sum((int(op["peer"]) - number) % n not in (1, n - 1) for op in rank.ops if op["kind"] == Kind.SEND)
        for number, rank in enumerate(seen.ranks)
    )


def expected(case: Case) -> list[Tensor]:
    """Return the parts of the attention over the whole sequence."""
    y = F.scaled_dot_product_attention(*whole(case), is_causal=True)
    return list(y.chunk(case.ranks, 2))


EXERCISE = OnRanks(
    cases=(Case(2, 71, {"scale": 1}), Case(3, 72, {"scale": 300}), Case(4, 73, {"scale": 3})),
    budgets=(
        Budget(CALLS, collectives, 0),
        Budget(ELSEWHERE, count_messages_elsewhere, 0),
        Budget("messages that a rank sends", messages, lambda case: 2 * (case.ranks - 1)),
        Budget("bytes that a rank sends", sent_bytes, lambda case: (case.ranks - 1) * block(case), "bytes"),
        Budget(HELD, peak("activations", "buffers"), lambda case: 9 * block(case), "bytes"),
    ),
)
