"""A rank that was not played gets the records of the one that does the same, rewritten for its own peers.

Which ranks do the same, so that one of them is played for all:

    along pp    each rank has stages of its own, and another order of actions: all are played
    along cp    later parts of a causal sequence attend to more, and rings start at different ranks: all are played
    along tp    shards are equal, unless the divided size is not a multiple of tp
    along dp    ranks with the same number of samples in each micro-batch do the same; all are played where groups of
                them divide experts

Records name other ranks: the members of a group ("0,2"), the ends of a message ("0>4#F3"), the root of a collective or
the other end of a message (`peer`). Along the axes in which these ranks differ, their coordinates stay the same. Along
all other axes they have the coordinates of the played rank, which are replaced by those of the other rank.

    played rank 0 of pp=2, dp=2, tp=2     mirrored to rank 3, at dp 1 and tp 1
    "0,1" (along tp)                      "2,3"
    "0,2" (along dp)                      "1,3"
    "0>4#F3" (along pp)                   "3>7#F3"
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from mpkit.plan.mesh import Mesh
from mpkit.plan.plan import Plan
from mpkit.strategies.data.microbatch import share, split
from mpkit.trace import Kind, RankTrace

__all__ = ["RankMirror", "kinds", "order"]


class RankMirror:
    """The records of one rank, rewritten for the ranks that it stands for.

    Args:
        recorded: the records.
        rank: the rank that was played.
        mesh: the mesh of the ranks.
    """

    def __init__(self, recorded: RankTrace, rank: int, mesh: Mesh) -> None:
        self._recorded, self._rank, self._mesh = recorded, rank, mesh
        ops = recorded.ops
        self._talks = np.flatnonzero((ops["kind"] >= Kind.SEND) & (ops["kind"] < Kind.COPY_TO_DEVICE))
        talks = ops[self._talks]
        self._groups = [int(line) for line in np.unique(talks["group"])]
        named = np.stack([talks["group"].astype(np.int64), talks["peer"]])
        self._named, which = np.unique(named, axis=1, return_inverse=True)
        self._which = which.reshape(-1)

    def trace_of(self, other: int) -> RankTrace:
        """Return what rank `other` would have recorded."""
        if other == self._rank:
            return self._recorded
        # ---- names of groups and messages
        names = list(self._recorded.names)
        for line in self._groups:
            names[line] = self._rewrite_name(names[line], other)
        # ---- roots and other ends
        peers = [
            peer if peer < 0 else self._map_member(peer, _members(self._recorded.names[line]), other)
            for line, peer in self._named.T.tolist()
        ]
        ops = self._recorded.ops
        if peers != self._named[1].tolist():
            ops = ops.copy()
            ops["peer"][self._talks] = np.array(peers)[self._which]
        return replace(self._recorded, ops=ops, names=names)

    def _rewrite_name(self, text: str, other: int) -> str:
        """Rewrite the name of a group or a message with the other rank's members."""
        _, hash_, tag = text.partition("#")
        members = _members(text)
        moved = [self._map_member(member, members, other) for member in members]
        assert other in moved, f"rank {self._rank} cannot stand for rank {other} in {text}"
        return (">" if hash_ else ",").join(map(str, moved)) + hash_ + tag

    def _map_member(self, member: int, members: Sequence[int], other: int) -> int:
        """Return the rank in the other rank's group that corresponds to `member` in the played rank's."""
        along = zip(*map(self._mesh.coordinates, members), strict=True)  # the coordinates along each axis
        theirs, place = self._mesh.coordinates(other), self._mesh.coordinates(member)
        return self._mesh.rank_at(
            new if len(set(each)) == 1 else old for each, new, old in zip(along, theirs, place, strict=True)
        )


def _members(text: str) -> list[int]:
    """Parse the ranks in the name of a group "0,2" or of a message "0>4#F3"."""
    ends, is_message, _ = text.partition("#")
    return [int(rank) for rank in ends.split(">" if is_message else ",")]


def kinds(plan: Plan, size: int, *, even: bool = True) -> list[int]:
    """Return for each rank the rank to play in its place: the first that does the same.

    Under DP, rank 0 does work that the others do not.

    >>> kinds(Plan.ddp(4), 8), kinds(Plan.ddp(4), 6), kinds(Plan.dp(3), 6), kinds(Plan(pp=2, dp=2, tp=2), 8)
    ([0, 0, 0, 0], [0, 0, 2, 2], [0, 1, 1], [0, 0, 0, 0, 4, 4, 4, 4])

    Args:
        plan: the plan of the training.
        size: the batch size.
        even: whether tensor-parallel ranks have equal shards.
    """
    mesh = plan.mesh
    places = [mesh.place(each) for each in range(plan.ranks)]
    first: dict[Hashable, int] = {}
    stands_for = []
    for each, place in enumerate(places):
        parts = split(size, plan.microbatches)
        gets = tuple(len(range(end)[share(start, end, place.dp, plan.dp)]) for start, end in parts)
        leads = plan.data_parallel == "dp" and each == 0
        shard = 0 if even and not mesh.folds else place.tp
        experts = place.dp if plan.ep > 1 else 0
        kind = place.pp, place.cp, shard, gets, leads, experts
        stands_for.append(first.setdefault(kind, each))
    return stands_for


def order(stands_for: list[int], plan: Plan) -> list[int]:
    """Return the ranks to play, in order: rank 0 first under DP, since the others do what it broadcasts.

    >>> order([1, 1], Plan.dp(2)), order([1, 1], Plan.ddp(2))
    ([0, 1], [1])
    """
    return sorted({*stands_for, *([0] if plan.data_parallel == "dp" else [])})
