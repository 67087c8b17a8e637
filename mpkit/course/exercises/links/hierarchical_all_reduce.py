"""A hierarchical all-reduce."""

from mpkit.course.author import *


# %% answer
def hierarchical_all_reduce(ctx: mk.Context, tensor: Tensor, k: int) -> Tensor:
    """Return the sum of all ranks' tensors.

    tensor: [length], the same length on each rank, a multiple of k.
    k: the ranks of each node; ctx.world_size is a multiple of it.
    """
    ### BEGIN SOLUTION
    n = ctx.world_size
    nodes = [ctx.comm.group(range(first, first + k)) for first in range(0, n, k)]
    across = [ctx.comm.group(range(place, n, k)) for place in range(k)]
    node, others = nodes[ctx.rank // k], across[ctx.rank % k]
    part = node.reduce_scatter(tensor)
    part = others.all_reduce(part)
    return node.all_gather(part)
    ### END SOLUTION


# %% checks
LENGTH = 24
BETWEEN, INSIDE = "bytes that a rank sends between nodes", "bytes that a rank sends inside of its node"


def given(case: Case, rank: int) -> Tensor:
    """Return a rank's tensor."""
    return torch.randint(100, (LENGTH,), generator=case.generator(rank)).double()


def expected(case: Case) -> list[Tensor]:
    """Return the sum, for each rank."""
    return [torch.stack([given(case, rank) for rank in range(case.ranks)]).sum(0)] * case.ranks


def between(case: Case) -> float:
    """Return the bytes that a rank may send between nodes."""
    k = case["a_node"]
    m = case.ranks // k
    return 2 * (m - 1) / m * LENGTH * 8 / k


def inside(case: Case) -> float:
    """Return the bytes that a rank may send inside of its node."""
    k = case["a_node"]
    return 2 * (k - 1) / k * LENGTH * 8


EXERCISE = OnRanks(
    cases=(Case(4, 1, {"a_node": 2}), Case(6, 2, {"a_node": 3}), Case(6, 3, {"a_node": 2})),
    play=call_with(lambda case, rank: (given(case, rank), case["a_node"])),
    budgets=(
        Budget(BETWEEN, node_bytes(leaving=True), between, "bytes"),
        Budget(INSIDE, node_bytes(leaving=False), inside, "bytes"),
    ),
)
