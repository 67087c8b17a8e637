"""Ring all-reduce."""

from mpkit.course.author import *


# %% answer
def all_reduce(ctx: mk.Context, tensor: Tensor) -> Tensor:
    """Replace every rank's tensor by the sum of all ranks' tensors, in place.

    tensor: (k,), of the same length on every rank; n need not divide k. Returns it.
    """
    ### BEGIN SOLUTION
    n, rank = ctx.world_size, ctx.rank
    before, after = (rank - 1) % n, (rank + 1) % n
    parts = tensor.tensor_split(n)  # views: what is written into them is written into the tensor
    # reduce-scatter
    for step in range(n - 1):
        mine, theirs = parts[(rank - step) % n], parts[(rank - step - 1) % n]
        buffer = torch.empty_like(theirs)
        arriving = ctx.comm.irecv(buffer, before)
        ctx.comm.send(mine, after)
        arriving.wait()
        theirs += buffer
    # all-gather
    for step in range(n - 1):
        mine, theirs = parts[(rank + 1 - step) % n], parts[(rank - step) % n]
        arriving = ctx.comm.irecv(theirs, before)
        ctx.comm.send(mine, after)
        arriving.wait()
    return tensor
    ### END SOLUTION


# %% checks
VOLUME = "bytes that a rank sends"


def given(case: Case, rank: int) -> Tensor:
    """Return a rank's tensor, a different one on each rank."""
    return torch.randint(1, 100, (case["length"],), generator=case.generator(rank)).double()


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Run the answer with this rank's tensor; return what is in it, if that is not what the answer returned."""
    tensor = given(case, ctx.rank)
    returned = answer(ctx, tensor)
    alike = isinstance(returned, Tensor) and returned.shape == tensor.shape
    return tensor if alike else returned


def expected(case: Case) -> list[Tensor]:
    """Return the sum for every rank."""
    return [torch.stack([given(case, rank) for rank in range(case.ranks)]).sum(0)] * case.ranks


def volume(case: Case) -> float:
    """Return 2(n-1)/n of the tensor's bytes if n divides its length; else count every part as long as the longest."""
    part = -(-int(case["length"]) // case.ranks)
    return 8 * 2 * (case.ranks - 1) * part


EXERCISE = OnRanks(
    cases=(
        Case(3, 1, {"length": 6}),
        Case(2, 2, {"length": 8}),
        Case(4, 3, {"length": 4000}),
        Case(3, 4, {"length": 1000}),
        Case(4, 5, {"length": 5}),
    ),
    budgets=(
        Budget("collectives", collectives, 0),
        Budget(VOLUME, sent_bytes, volume, "bytes"),
        Budget("messages that a rank sends", messages, lambda case: 2 * (case.ranks - 1)),
    ),
)
