"""Which ranks do the same, so that one of them is played for all.

along pp    each has stages of its own, and another order of actions: all are played
along cp    of a causal sequence the later parts look back further, and rings start elsewhere: all are played
along tp    shards are alike, unless what is divided does not divide evenly
along dp    those with the same number of samples in each micro-batch
"""

from __future__ import annotations

from collections.abc import Hashable

from mpkit.parallel.microbatch import share, split
from mpkit.plan import Plan

__all__ = ["kinds", "order"]


def kinds(plan: Plan, size: int, rank: int | None, *, even: bool = True) -> list[int]:
    """By rank, which rank to play in its place: the first that does the same.

    Under DP rank 0 does what the others do not.

    >>> kinds(Plan.ddp(4), 8, None), kinds(Plan.ddp(4), 6, None), kinds(Plan.dp(3), 6, None), kinds(Plan.ddp(3), 3, 2)
    ([0, 0, 0, 0], [0, 0, 2, 2], [0, 1, 1], [2, 2, 2])
    >>> kinds(Plan(pp=2, dp=2, tp=2), 8, None), kinds(Plan(pp=2, dp=2, tp=2), 8, 3)
    ([0, 0, 0, 0, 4, 4, 4, 4], [3, 3, 3, 3, 7, 7, 7, 7])

    Args:
        plan: of the training.
        size: of a batch.
        rank: whose places along dp and tp are played; None: of each kind the first.
        even: whether tensor-parallel ranks have shards that are alike.
    """
    mesh = plan.mesh
    places = [mesh.place(each) for each in range(plan.ranks)]
    if rank is not None:
        mine = mesh.place(rank)
        return [mesh.rank(place.pp, mine.dp, place.cp, mine.tp) for place in places]
    first: dict[Hashable, int] = {}
    found = []
    for each, place in enumerate(places):
        parts = split(size, plan.microbatches)
        gets = tuple(len(range(end)[share(start, end, place.dp, plan.dp)]) for start, end in parts)
        leads = plan.data_parallel == "dp" and each == 0
        shard = 0 if even else place.tp
        found.append(first.setdefault((place.pp, place.cp, shard, gets, leads), each))
    return found


def order(stands_for: list[int], plan: Plan) -> list[int]:
    """Which ranks to play: under DP the others do what rank 0 tells them, so it has its say first.

    >>> order([1, 1], Plan.dp(2)), order([1, 1], Plan.ddp(2))
    ([0, 1], [1])
    """
    return sorted({*stands_for, *([0] if plan.data_parallel == "dp" else [])})
