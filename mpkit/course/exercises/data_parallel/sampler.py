"""A sampler whose shards differ.

Which samples does a rank train on in an epoch? Nobody hands them out: every rank works it out by itself, and yet
together they take **every sample exactly once**. That works because all ranks shuffle with the same seed, and so have
the same order in mind, from which each takes another part.

Write what a rank asks at the beginning of an epoch. The order is shuffled, and is another one in every epoch and for
every seed: not only the order changes, also which samples a rank gets. It follows from `seed` and `epoch` alone.
(Nobody knows what else has drawn random numbers on a rank: use a generator of your own, `torch.Generator()`, and
`torch.randperm(n, generator=...)`.) No sample is lost and none comes twice, also where the ranks do not divide their
number; then some ranks have one more than others. No communication is needed.

(PyTorch's `DistributedSampler` does this too, but repeats or drops samples to make the shards of one size. Its
`set_epoch` is what people forget.)
"""

from __future__ import annotations

import torch

import mpkit as mk
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks


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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the properties of the answer's shards, on this rank and on all ranks together."""
    assert callable(answer)
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
    one = {
        "indices that do not exist": 0,
        "samples that no rank takes": 0,
        "samples taken more than once": 0,
        "fair": True,
        "shuffled": True,
        "another order in every epoch": True,
        "the same order when asked again": True,
        "other samples in every epoch": True,
        "another order for another seed": True,
    }
    return [one] * case.ranks


EXERCISE = OnRanks(
    solution=shard,
    cases=(Case(2, 1, {"samples": 24}), Case(3, 2, {"samples": 32}), Case(4, 3, {"samples": 41})),
    play=play,
    expected=expected,
    result="shards of 3 epochs",
    after="02-data-parallel",
    place=90,
    start="Two steps: an order of all samples that every rank agrees on, and this rank's part of it. Begin with the "
    "second: `list(range(samples))[ctx.rank :: ctx.world_size]` covers everything once. Then shuffle before you deal.",
    mistakes=(
        Mistake(
            "the-same-shard-everywhere",
            (
                "Do two ranks ever take different samples?",
                "All ranks shuffle alike, which is right, and then all take the same part. Four devices that train "
                "on the same samples train no more than one. The part has to depend on `ctx.rank`.",
                "`order[ctx.rank :: ctx.world_size]`.",
            ),
            [("order[ctx.rank :: ctx.world_size]", "order[0 :: ctx.world_size]")],
        ),
        Mistake(
            "each-rank-shuffles-for-itself",
            (
                "Each shard is fine by itself. What of all of them together?",
                "The shards are parts of one deck of cards only if all ranks shuffle it in the same way. With a seed "
                "that depends on the rank each deals from a deck of its own: some samples come twice, others never.",
                "Leave the rank out of the seed: `manual_seed(seed + epoch)`.",
            ),
            [("seed + epoch)", "seed + epoch + 1000 * ctx.rank)")],
        ),
        Mistake(
            "the-same-order-in-every-epoch",
            (
                "Compare the shards of epoch 0 and epoch 1.",
                "With the same seed the shuffle is the same: every epoch has the same batches, in the same order. "
                "The epoch belongs into the seed.",
            ),
            [("seed + epoch", "seed")],
        ),
        Mistake(
            "the-seed-does-not-count",
            (
                "Compare the shards of two seeds, in epoch 0 as well.",
                "Two runs with different seeds have to see the samples in different orders, in every epoch. A seed "
                "that is left out, or multiplied by the epoch (which is 0 at first), changes nothing. "
                "`seed + epoch` does.",
            ),
            [("seed + epoch", "epoch")],
            when=lambda seen: any(
                one["shuffled"] and not one["another order for another seed"] for one in seen.got
            ),
        ),
        Mistake(
            "shuffles-within-a-fixed-shard",
            (
                "The order is another one in every epoch. Which samples does a rank get?",
                "You deal first and shuffle afterwards: a rank has the same samples in every epoch, and never meets "
                "the others. Shuffle all, then deal.",
            ),
            """
            def shard(ctx: mk.Context, samples: int, seed: int, epoch: int) -> list[int]:
                mine = torch.arange(samples)[ctx.rank :: ctx.world_size]
                order = torch.randperm(len(mine), generator=torch.Generator().manual_seed(seed + epoch))
                return mine[order].tolist()
            """,
            when=lambda seen: (
                all(one["shuffled"] and not one["other samples in every epoch"] for one in seen.got)
                and all(one["another order in every epoch"] for one in seen.got)
            ),
        ),
        Mistake(
            "never-shuffles",
            (
                "In which order are the samples of a shard?",
                "Data sets are often sorted: a rank that goes through them in order sees one class after the other. "
                "Shuffle the indices (`torch.randperm` with a seeded generator) before you deal them.",
            ),
            [("torch.randperm(samples, generator=generator)", "torch.arange(samples)")],
        ),
        Mistake(
            "loses-the-remainder",
            (
                "With 2 ranks and 24 samples all is well. What if the ranks do not divide the samples?",
                "`samples // ctx.world_size` rounds down: up to n-1 samples belong to nobody. Let some ranks have "
                "one more; a stride does that by itself.",
            ),
            [
                (
                    "order[ctx.rank :: ctx.world_size].tolist()",
                    "order[: samples // ctx.world_size * ctx.world_size][ctx.rank :: ctx.world_size].tolist()",
                )
            ],
        ),
        Mistake(
            "shuffles-with-whatever-there-is",
            (
                "Where do your random numbers come from? Do all ranks have drawn the same ones so far?",
                "Without a generator of its own `torch.randperm` goes on from the rank's global state, which differs "
                "from rank to rank and from call to call. Make a `torch.Generator()`, and seed it with seed and "
                "epoch.",
            ),
            [("torch.randperm(samples, generator=generator)", "torch.randperm(samples)")],
            when=lambda seen: any(not one["the same order when asked again"] for one in seen.got),
        ),
    ),
    otherwise=(
        "Write down the shards of 2 ranks and 5 samples for epochs 0 and 1. Join them: is each of 0 to 4 there once, "
        "in each epoch?",
    ),
)
