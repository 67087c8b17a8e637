"""Reshard a checkpoint.

A training ran on n ranks, and each saved its shards. Now it goes on with m ranks. Nobody can hold the whole model, so
nobody gathers it: each new rank reads exactly what it needs, from the files of those old ranks that have it.

A parameter with N elements is divided like this: a shard has c = ceil(N/n) elements, rank r those from r·c on, and
what is missing at the end is zeros (`flat([parameter], n).chunk(n)[r]`). With m ranks it is the same with ceil(N/m).

`read(rank, name, first, last)` returns the elements first to last-1 of the old rank's shard of that name, a tensor of
length last - first. The checkpoint has weights and Adam's states, under names such as "0.weight/exp_avg": to you they
are all alike. Everything is float64.

Return this rank's new shards, by name, each of ceil(N/m) elements. Budget: a rank reads no more elements than its new
shards have, and the ranks do not communicate.

Sources: PyTorch's `torch.distributed.checkpoint`; Lian et al., "Universal Checkpointing", 2024.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import mpkit as mk
from mpkit.course.exercises.zero import flat
from mpkit.course.framework.exercise import Budget, Case, Mistake
from mpkit.course.framework.measures import collectives, messages
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.seen import Seen


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


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return this rank's new shards; how many elements it read is recorded."""
    assert callable(answer)
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
    assert seen.trace is not None
    return max(
        float(next(op["flops"] for op in rank.ops if rank.name(int(op["name"])) == READ))
        for rank in seen.trace.ranks
    )


EXERCISE = OnRanks(
    solution=reshard,
    cases=(
        Case(4, 1, {"before": 2}),
        Case(2, 2, {"before": 3}),
        Case(3, 3, {"before": 4}),
        Case(4, 4, {"before": 6}),
    ),
    play=play,
    expected=expected,
    result="the new shards",
    budgets=(
        Budget(READ, elements, lambda case: sum(-(-size // case.ranks) for size in NAMES.values())),
        Budget("collectives", collectives, 0),
        Budget("messages that a rank sends", messages, 0),
    ),
    after="03-zero",
    place=90,
    start="Take one name. Of the N elements, which ones does new rank r have? `begin` and `end`. And which does "
    "old rank s have? "
    "What both have is what r reads from s.",
    mistakes=(
        Mistake(
            "the-shard-s-own-numbers",
            (
                "The report names a shard and places that it does not have. From where do you count?",
                "`first` and `last` count within the old shard: subtract where it begins, s·c.",
            ),
            [
                (
                    "read(source, name, first - source * old, last - source * old)",
                    "read(source, name, first, last)",
                )
            ],
            when=lambda seen: "IndexError" in seen.error and "there are no" in seen.error,
        ),
        Mistake(
            "reads-everything",
            (
                "The shards are right. How many elements did each rank read?",
                "All of them: the whole checkpoint went through every rank, and would not fit. Read what this "
                "rank needs only.",
            ),
            [
                (
                    "parts.append(read(source, name, first - source * old, last - source * old))",
                    "parts.append(read(source, name, 0, old)[first - source * old : last - source * old])",
                )
            ],
            when=lambda seen: seen.budget == READ,
        ),
        Mistake(
            "shards-rounded-down",
            (
                "How many elements has a shard of 7 elements on 2 ranks?",
                "Four, the last rank's filled up with a zero: round up, `-(-size // n)`. Rounded down, the last ones "
                "are lost.",
            ),
            [("-(-size // n), -(-size // m)", "size // n, size // m")],
        ),
        Mistake(
            "without-the-optimizer",
            (
                "Which names are missing in your shards?",
                "The states of the optimizer are saved under names of their own, and are resharded like the "
                "weights. Without "
                "them Adam begins anew.",
            ),
            [
                (
                    "    for name, size in sizes.items():\n",
                    '    for name, size in sizes.items():\n        if "/" in name:\n            continue\n',
                )
            ],
        ),
        Mistake(
            "last-is-not-included",
            (
                "How many elements are missing in each shard?",
                "`read` returns the elements first to last-1, as slices do: nothing has to be subtracted.",
            ),
            [("last - source * old))", "last - source * old - 1))")],
        ),
        Mistake(
            "not-filled-up",
            (
                "Which shards are too short, and on which rank?",
                "Those at the end: every rank's shard has ceil(N/m) elements, the missing ones are zeros.",
            ),
            [("new - (end - begin)", "0")],
        ),
        Mistake(
            "one-file-per-rank",
            (
                "From how many old ranks does a new rank need something?",
                "From all whose elements it has some of: a new shard may begin in one old shard and end in the "
                "next or the one "
                "after that.",
            ),
            [
                ("for source in range(n):", "for source in [min(rank * n // m, n - 1)]:"),
                (
                    "parts.append(torch.zeros(new - (end - begin), dtype=torch.float64))",
                    "parts.append(torch.zeros(new - sum(map(len, parts)), dtype=torch.float64))",
                ),
            ],
        ),
        Mistake(
            "renamed-not-resharded",
            (
                "Old rank 0's shard is half as long, or twice. Can new rank 0 take it as it is?",
                "The cuts lie elsewhere with m ranks: shard r of m is another part of the N elements than shard "
                "r of n.",
            ),
            """
            def reshard(rank, n, m, sizes, read):
                return {name: read(rank % n, name, 0, -(-size // n)) for name, size in sizes.items()}
            """,
        ),
    ),
    otherwise=(
        "Take N = 7, from 2 ranks to 4: old shards are 0 1 2 3 and 4 5 6 ·, new ones 0 1, 2 3, 4 5 and 6 ·.",
    ),
)
