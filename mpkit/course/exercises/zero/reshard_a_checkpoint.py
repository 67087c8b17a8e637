"""Reshard a checkpoint."""

from mpkit.course.author import *
from mpkit.course.exercises.zero import flat


# %% answer
def reshard(
    rank: int, n: int, m: int, sizes: dict[str, int], read: Callable[[int, str, int, int], Tensor]
) -> dict[str, Tensor]:
    """Return the shards of rank `rank` of m, by name, from the shards of n ranks.

    sizes: N of each name. read(old_rank, name, first, last): some elements of an old shard, [last - first].
    """
    shards = {}
    ### BEGIN SOLUTION
    for name, size in sizes.items():
        old, new = -(-size // n), -(-size // m)  # elements of a shard, rounded up
        begin, end = min(rank * new, size), min((rank + 1) * new, size)
        parts = []
        for source in range(n):
            first, last = max(begin, source * old), min(end, (source + 1) * old)
            if first < last:
                parts.append(read(source, name, first - source * old, last - source * old))
        parts.append(torch.zeros(new - (end - begin), dtype=torch.float64))
        shards[name] = torch.cat(parts)
    ### END SOLUTION
    return shards


# %% checks
SIZES = {"0.weight": 24, "0.bias": 7, "1.weight": 35, "1.bias": 5, "norm.weight": 1}
NAMES = {f"{name}{state}": size for name, size in SIZES.items() for state in ("", "/exp_avg")}
READ = "elements that a rank reads"


def whole(case: Case) -> dict[str, Tensor]:
    """Return everything that the checkpoint has, whole."""
    generator = case.generator()
    return {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in NAMES.items()}


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return this rank's new shards; how many elements it read is recorded."""
    n, count = case["before"], [0]
    saved = {name: flat([tensor], n).chunk(n) for name, tensor in whole(case).items()}

    def read(rank: int, name: str, first: int, last: int) -> Tensor:
        shard = saved[name][rank]
        if not 0 <= first <= last <= len(shard):
            raise IndexError(
                f"{name} of rank {rank} has {len(shard)} elements; there are no {first} to {last}"
            )
        count[0] += last - first
        return shard[first:last].clone()

    shards = answer(ctx.rank, n, ctx.world_size, dict(NAMES), read)
    with ctx.record.span(READ, flops=count[0]):
        pass
    return shards


def expected(case: Case) -> list[dict[str, Tensor]]:
    """Return each rank's shards, cut from the whole."""
    m = case.ranks
    return [
        {name: flat([tensor], m).chunk(m)[rank] for name, tensor in whole(case).items()} for rank in range(m)
    ]


def elements(seen: Seen) -> float:
    """Return how many elements the busiest rank reads."""
    return max(
        float(next(op["flops"] for op in rank.ops if rank.name(int(op["name"])) == READ))
        for rank in seen.ranks
    )


EXERCISE = OnRanks(
    cases=(
        Case(4, 1, {"before": 2}),
        Case(2, 2, {"before": 3}),
        Case(3, 3, {"before": 4}),
        Case(4, 4, {"before": 6}),
    ),
    budgets=(
        Budget(READ, elements, lambda case: sum(-(-size // case.ranks) for size in NAMES.values())),
        Budget("collectives", collectives, 0),
        Budget("messages that a rank sends", messages, 0),
    ),
)
