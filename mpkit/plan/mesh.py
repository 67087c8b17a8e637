"""Mesh: which rank has which place along the axes pp, dp, cp and tp. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

__all__ = ["AXES", "Mesh", "Place"]

AXES = ("pp", "dp", "cp", "tp")
"""Pipeline stages, replicas, parts of a sequence, shards of a layer; the last varies fastest."""


class Place(NamedTuple):
    """A rank's coordinates."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Mesh:
    """Ranks laid out as a box of pp x dp x cp x tp.

    Neighbouring ranks differ in tp first, since tensor parallelism communicates most and neighbours share a node's
    fast links, and in pp last (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, section 5.3).

    >>> mesh = Mesh(pp=2, dp=1, tp=2)
    >>> [mesh.place(rank) for rank in range(mesh.size)][2]
    Place(pp=1, dp=0, cp=0, tp=0)
    >>> mesh.groups("pp")
    [(0, 2), (1, 3)]
    >>> mesh.groups("pp", "tp")
    [(0, 1, 2, 3)]
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The degrees, in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """The number of ranks in the mesh."""
        return prod(self.shape)

    def place(self, rank: int) -> Place:
        """Return the coordinates of a rank."""
        assert 0 <= rank < self.size, f"rank {rank} is not in {self}"
        coordinates = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return Place(**coordinates)

    def rank(self, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates."""
        place = Place(pp, dp, cp, tp)
        assert all(0 <= i < n for i, n in zip(place, self.shape, strict=True)), f"{place} is not in {self}"
        number = 0
        for i, n in zip(place, self.shape, strict=True):
            number = number * n + i
        return number

    def replica(self, rank: int) -> int:
        """Return the number of a rank's replica; ranks along cp hold the same weights as those along dp."""
        place = self.place(rank)
        return place.dp * self.cp + place.cp

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks, in ascending order, that differ from this one along these axes only, itself included."""
        place = self.place(rank)
        ways = [range(n) if axis in axes else (place[i],) for i, (axis, n) in enumerate(self._degrees())]
        return tuple(self.rank(*place) for place in product(*ways))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return every group along these axes, sorted by first rank. Each rank is in exactly one of them."""
        groups = dict.fromkeys(self.group(rank, *axes) for rank in range(self.size))
        return list(groups)

    def order(self, *outermost: str) -> tuple[int, ...]:
        """Return the ranks sorted by their coordinates along these axes first.

        Ranks that differ along these axes are then furthest apart.

        >>> Mesh(pp=2, dp=2, tp=2).order("tp")  # on two nodes, each has a half of every layer
        (0, 2, 4, 6, 1, 3, 5, 7)
        """
        return tuple(
            sorted(range(self.size), key=lambda rank: [getattr(self.place(rank), axis) for axis in outermost])
        )

    def _degrees(self) -> list[tuple[str, int]]:
        return list(zip(AXES, self.shape, strict=True))
