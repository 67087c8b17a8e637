"""Pass a token round a ring."""

from mpkit.course.author import *


# %% answer
def pass_the_token(ctx: mk.Context, token: Tensor) -> Tensor:
    """Pass `token` once round the ring; each rank but 0 adds its rank to it.

    token: one number; rank 0's is the one that goes round. Returns it as this rank had it last.
    """
    ### BEGIN SOLUTION
    before, after = (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size
    if ctx.rank == 0:
        ctx.comm.send(token, after)
        ctx.comm.recv(token, before)
    else:
        ctx.comm.recv(token, before)
        token += ctx.rank
        ctx.comm.send(token, after)
    return token
    ### END SOLUTION


# %% checks
def given(case: Case, rank: int) -> Tensor:
    """Return a rank's number, a different one on each rank."""
    return torch.randint(100, (1,), generator=case.generator(rank))


def expected(case: Case) -> list[Tensor]:
    """Return each rank's token: ranks 1 to r have been added on rank r, all of them on rank 0."""
    start = given(case, 0)
    return [start + sum(range(1, (rank or case.ranks - 1) + 1)) for rank in range(case.ranks)]


EXERCISE = OnRanks(
    cases=(Case(2, seed=1), Case(3, seed=2), Case(4, seed=3)),
    play=call_with(lambda case, rank: (given(case, rank),)),
    budgets=(Budget("messages that a rank sends", messages, 1), Budget("collectives", collectives, 0)),
)
