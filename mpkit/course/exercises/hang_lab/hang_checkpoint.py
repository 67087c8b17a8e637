"""Hang: the checkpoint.

The weights are sharded: each rank holds its own rows, as in ZeRO-3. After training, rank 0 saves the whole weight; the
other ranks need not hold it. Nobody goes on before it is saved: the barrier at the end is there for that, and stays.

The program below would wait for ever, and mpkit stops it. **Check it as it is, and read the report**: where is rank 0,
and where are the others? Then mend it. Rank 0 returns the whole weight, the others `None`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen
from mpkit.trace import Kind, Lane


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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Run the answer with this rank's part of each."""
    assert callable(answer)
    return answer(ctx, *(each.chunk(case.ranks)[ctx.rank].contiguous() for each in given(case)))


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
    assert seen.trace is not None
    last = [rank.ops[rank.ops["lane"] == Lane.COMM]["kind"][-1:] for rank in seen.trace.ranks]
    return float(sum(not (kinds == Kind.BARRIER).all() or not len(kinds) for kinds in last))


SAVE = """\
whole = ctx.comm.gather(shard, dst=0)
    if ctx.rank == 0:
        saved = whole"""

EXERCISE = OnRanks(
    solution=train_and_save,
    cases=(Case(2, 1), Case(3, 2), Case(4, 3)),
    play=play,
    expected=expected,
    result="what was saved",
    budgets=(Budget("ranks that go on before it is saved", gone_on, 0),),
    after="03-zero",
    place=40,
    start="Check the program as it is, and read the report: who waits, in what, and for whom?",
    mistakes=(
        Mistake(
            "gather-by-the-root-only",
            (
                "Rank 0 now waits in a gather. Who is to give it anything?",
                "Only the root gets the whole from a gather, but every rank gives its part: all of them have to "
                "call it. In a branch for rank 0, only rank 0 does.",
                "Call `whole = ctx.comm.gather(shard, dst=0)` on every rank, and keep it on rank 0.",
            ),
            [(SAVE, "if ctx.rank == 0:\n        saved = ctx.comm.gather(shard, dst=0)")],
            when=lambda seen: " in gather number" in seen.hang or "calls gather(" in seen.mismatch,
        ),
        Mistake(
            "a-branch-on-rank",
            (
                "The report says that rank 0 and the others are in different collectives. Which line is rank 0 in, "
                "and why is no other rank there?",
                "The all_gather stands in a branch that only rank 0 takes. The others pass by and go on to the "
                "barrier. A collective in `if ctx.rank == 0:` is a hang, whatever it is for.",
                "Take the collective out of the branch, so that every rank calls it; what is done with its outcome "
                "stays in.",
            ),
            [(SAVE, "if ctx.rank == 0:\n        saved = ctx.comm.all_gather(shard)")],
            when=lambda seen: seen.mismatch or "never came to all_gather" in seen.hang,
        ),
        Mistake(
            "no-barrier",
            (
                "What was saved is right. When does a rank that is not rank 0 leave your function?",
                "A rank that gives its part to a gather is done with it, and goes on while rank 0 still saves. All "
                "meet in `ctx.comm.barrier()`, after what rank 0 does.",
            ),
            [("    ctx.comm.barrier()\n", "")],
            when=lambda seen: seen.budget,
        ),
        Mistake(
            "saves-its-own-shard",
            (
                "It ends. How many rows has what was saved?",
                "Without the collective, rank 0 saves the rows that it has itself. The others' are lost.",
            ),
            [("whole = ctx.comm.gather(shard, dst=0)", "whole = shard")],
        ),
        Mistake(
            "everybody-keeps-it",
            (
                "It ends, and rank 0 is right. What do the other ranks return?",
                "All of them hold the whole weight now: what sharding was there to avoid. Only rank 0 saves.",
                "All call the collective, and `if ctx.rank == 0:` keeps what came. With `gather` the others get "
                "nothing in the first place.",
            ),
            [(SAVE, "saved = ctx.comm.all_gather(shard)")],
        ),
        Mistake(
            "the-others-keep-nothing",
            (
                "It ends. What do ranks other than 0 return: nothing, or an empty tensor?",
                "gather gives an empty tensor on all ranks but the root. Only rank 0 has saved something: set "
                "`saved` there only.",
            ),
            [(SAVE, "saved = ctx.comm.gather(shard, dst=0)")],
        ),
        Mistake(
            "summed-not-gathered",
            (
                "It ends. Has what was saved as many rows as the weight?",
                "reduce and all_reduce add the shards up. They are different rows of one weight: they have to be "
                "put one below the other.",
            ),
            [("ctx.comm.gather(shard, dst=0)", "ctx.comm.reduce(shard, dst=0)")],
        ),
    ),
    otherwise=(
        "It is no longer the hang. What has rank 0 saved: of which shape should it be, and what is in which row?",
    ),
)
