"""A sampler whose shards differ."""

from mpkit.course.author import *


# %% answer
def shard(ctx: mk.Context, samples: int, seed: int, epoch: int) -> list[int]:
    """Return the indices, out of 0 to samples - 1, that this rank trains on in this epoch, in their order."""
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(samples, generator=generator)
    return order[ctx.rank :: ctx.world_size].tolist()
    ### END SOLUTION


# %% checks
EPOCHS = 3


def play(ctx: mk.Context, answer: Answer, case: Case) -> object:
    """Return the properties of the answer's shards, on this rank and on all ranks together."""
    n, seed = case["samples"], 100 * case.seed
    torch.manual_seed(ctx.rank)  # as in practice, the ranks' own random numbers differ
    shards = []
    for epoch in range(EPOCHS):
        shards.append([int(i) for i in answer(ctx, n, seed, epoch)])
        torch.rand(ctx.rank + 1)
    again = [int(i) for i in answer(ctx, n, seed, 1)]
    others = [[int(i) for i in answer(ctx, n, seed + 17, epoch)] for epoch in range(EPOCHS)]
    # ---- together
    taken = torch.zeros(EPOCHS, n)
    wrong = 0
    for epoch, mine in enumerate(shards):
        for i in mine:
            if 0 <= i < n:
                taken[epoch, i] += 1
            else:
                wrong += 1
    ctx.comm.all_reduce(taken)
    return {
        "indices that do not exist": wrong,
        "samples that no rank takes": int((taken == 0).sum()),
        "samples taken more than once": int((taken > 1).sum()),
        "fair": all(n // ctx.world_size <= len(mine) <= -(-n // ctx.world_size) for mine in shards),
        "shuffled": all(mine != sorted(mine) for mine in shards),
        "another order in every epoch": len({tuple(mine) for mine in shards}) == EPOCHS,
        "the same order when asked again": again == shards[1],
        "other samples in every epoch": len({frozenset(mine) for mine in shards}) == EPOCHS,
        "another order for another seed": all(a != b for a, b in zip(shards, others, strict=True)),
    }


def expected(case: Case) -> list[object]:
    """Return the properties that every good sampler has."""
    none = ("indices that do not exist", "samples that no rank takes", "samples taken more than once")
    always = (
        "fair", "shuffled", "another order in every epoch", "the same order when asked again",
        "other samples in every epoch", "another order for another seed",
    )  # fmt: skip
    return [dict.fromkeys(none, 0) | dict.fromkeys(always, True)] * case.ranks


EXERCISE = OnRanks(
    cases=(Case(2, 1, {"samples": 24}), Case(3, 2, {"samples": 32}), Case(4, 3, {"samples": 41}))
)
