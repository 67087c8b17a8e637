"""Clip by the true global norm."""

from mpkit.course.author import *


# %% answer
def clip_by_norm(ctx: mk.Context, shards: list[Tensor], copies: list[Tensor], max_norm: float) -> Tensor:
    """Clip all gradients in place, and return the norm that they had, one number, the same on every rank.

    shards: gradients of which this rank has an n-th, [k_i]. copies: those that every rank has whole, [...].
    """
    ### BEGIN SOLUTION
    squares = torch.stack([shard.square().sum() for shard in shards]).sum()
    squares = ctx.comm.all_reduce(squares)
    squares = squares + sum(copy.square().sum() for copy in copies)
    norm = squares.sqrt()
    if norm > max_norm:
        for grad in shards + copies:
            grad *= max_norm / norm
    return norm
    ### END SOLUTION


# %% checks
SENT = "bytes of collectives"
SHAPES = ((12, 6), (5, 12))
SMALL = ((7,), (3, 2))


def whole(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Return the large gradients, which are sharded, and the small ones, which are copied."""
    generator = case.generator(99)
    large = [torch.randn(shape, generator=generator, dtype=torch.float64).flatten() for shape in SHAPES]
    small = [2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SMALL]
    large[0] *= torch.linspace(0.1, 3, len(large[0]))  # so that ranks' parts differ
    return large, small


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the norm, and this rank's gradients after clipping."""
    large, copies = whole(case)
    shards = [grad.chunk(case.ranks)[ctx.rank].clone() for grad in large]
    norm = answer(ctx, shards, copies, case["max_norm"])
    return {"norm": norm, "shards": shards, "copies": copies}


def expected(case: Case) -> list[dict[str, object]]:
    """Return what torch's own clipping gives with all gradients on one device."""
    large, small = whole(case)
    held = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in large + small]
    for parameter, grad in zip(held, large + small, strict=True):
        parameter.grad = grad
    norm = torch.nn.utils.clip_grad_norm_(held, case["max_norm"])
    return [
        {
            "norm": norm.float(),
            "shards": [g.chunk(case.ranks)[rank].float() for g in large],
            "copies": [g.float() for g in small],
        }
        for rank in range(case.ranks)
    ]


EXERCISE = OnRanks(
    cases=(
        Case(2, seed=61, sizes={"max_norm": 2.0}),
        Case(3, seed=62, sizes={"max_norm": 100.0}),
        Case(4, seed=63, sizes={"max_norm": 0.5}),
    ),
    budgets=(Budget("collectives", collectives, 1), Budget(SENT, payload, 8, "bytes")),
)
