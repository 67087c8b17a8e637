"""Which ranks do the same, so that one of them is played for all.

along pp    each rank has stages of its own, and another order of actions: all are played
along cp    later parts of a causal sequence attend to more, and rings start at different ranks: all are played
along tp    shards are equal, unless the divided size is not a multiple of tp
own axes    what their strategies do is not known: all are played
along dp    ranks with the same number of samples in each micro-batch do the same; all are played where groups of them
            divide experts
"""

from __future__ import annotations

from collections.abc import Hashable

from mpkit.plan.plan import Plan
from mpkit.strategies.data.microbatch import share, split

__all__ = ["kinds", "order"]


def kinds(plan: Plan, size: int, rank: int | None, *, even: bool = True) -> list[int]:
    """Return for each rank the rank to play in its place: the first that does the same.

    Under DP, rank 0 does work that the others do not.

    >>> kinds(Plan.ddp(4), 8, None), kinds(Plan.ddp(4), 6, None), kinds(Plan.dp(3), 6, None), kinds(Plan.ddp(3), 3, 2)
    ([0, 0, 0, 0], [0, 0, 2, 2], [0, 1, 1], [2, 2, 2])
    >>> kinds(Plan(pp=2, dp=2, tp=2), 8, None), kinds(Plan(pp=2, dp=2, tp=2), 8, 3)
    ([0, 0, 0, 0, 4, 4, 4, 4], [3, 3, 3, 3, 7, 7, 7, 7])

    Args:
        plan: the plan of the training.
        size: the batch size.
        rank: the rank whose places along dp and tp are played; None: the first of each kind.
        even: whether tensor-parallel ranks have equal shards.
    """
    mesh = plan.mesh
    places = [mesh.place(each) for each in range(plan.ranks)]
    offsets = [each - mesh.rank(*place) for each, place in enumerate(places)]  # along one's own axes
    if rank is not None:
        mine = mesh.place(rank)
        alike = [
            mesh.rank(
                each.pp, each.dp if plan.ep > 1 else mine.dp, each.cp, each.tp if mesh.folds else mine.tp
            )
            for each in places
        ]
        return [base + own for base, own in zip(alike, offsets, strict=True)]
    first: dict[Hashable, int] = {}
    stands_for = []
    for each, place in enumerate(places):
        parts = split(size, plan.microbatches)
        gets = tuple(len(range(end)[share(start, end, place.dp, plan.dp)]) for start, end in parts)
        leads = plan.data_parallel == "dp" and each == 0
        shard = 0 if even and not mesh.folds else place.tp
        experts = place.dp if plan.ep > 1 else 0
        kind = place.pp, place.cp, shard, gets, leads, experts, offsets[each]
        stands_for.append(first.setdefault(kind, each))
    return stands_for


def order(stands_for: list[int], plan: Plan) -> list[int]:
    """Return the ranks to play, in order: rank 0 first under DP, since the others do what it broadcasts.

    >>> order([1, 1], Plan.dp(2)), order([1, 1], Plan.ddp(2))
    ([0, 1], [1])
    """
    return sorted({*stands_for, *([0] if plan.data_parallel == "dp" else [])})
