"""Hang: the checkpoint."""

from mpkit.course.author import *


# %% answer
def train_and_save(ctx: mk.Context, shard: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    """Train for two steps with a sharded weight, then write a checkpoint on rank 0.

    shard: (k, d), this rank's rows of the weight. x, y: (b, d) and (b, n k), its samples. Returns what was saved.
    """
    for _ in range(2):
        weight = ctx.comm.all_gather(shard).requires_grad_()
        F.mse_loss(x @ weight.t(), y).backward()
        shard = shard - 0.1 * ctx.comm.reduce_scatter(weight.grad) / ctx.world_size
    saved = None
    ### BEGIN SOLUTION
    # instead: if ctx.rank == 0:
    # instead:     saved = ctx.comm.all_gather(shard)
    whole = ctx.comm.gather(shard, dst=0)
    if ctx.rank == 0:
        saved = whole
    ### END SOLUTION
    ctx.comm.barrier()
    return saved


# %% checks
def given(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight (n k, d), and the samples of every rank."""
    n = case.ranks
    draw = torch.randn(2 * n + 4 * n + 4 * n, 2 * n, generator=case.generator(), dtype=torch.float64)
    return draw[: 2 * n, :3].contiguous(), draw[2 * n : 6 * n, :3], draw[6 * n :]


def inputs(case: Case, rank: int) -> tuple[Tensor, ...]:
    """Return a rank's part of each."""
    return tuple(each.chunk(case.ranks)[rank].contiguous() for each in given(case))


def expected(case: Case) -> list[Tensor | None]:
    """Return the weight of serial training with all samples, on rank 0 only."""
    weight, x, y = given(case)
    for _ in range(2):
        weight = weight.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.mse_loss(x @ weight.t(), y), weight)
        weight = weight - 0.1 * gradient
    return [weight.detach(), *[None] * (case.ranks - 1)]


def gone_on(seen: Seen) -> float:
    """Count the ranks that do not end with a barrier."""
    last = [rank.ops[rank.ops["lane"] == Lane.COMM]["kind"][-1:] for rank in seen.ranks]
    return float(sum(not (kinds == Kind.BARRIER).all() or not len(kinds) for kinds in last))


EXERCISE = OnRanks(
    cases=(Case(2, 1), Case(3, 2), Case(4, 3)),
    play=call_with(inputs),
    budgets=(Budget("ranks that go on before it is saved", gone_on, 0),),
)
