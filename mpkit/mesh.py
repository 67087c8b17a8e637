"""Mesh: which rank has which place along the axes pp, dp and tp. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

__all__ = ["AXES", "Mesh", "Place"]

AXES = ("pp", "dp", "tp")
"""Pipeline stages, replicas, shards of a layer; the last varies fastest."""


class Place(NamedTuple):
    """A rank's coordinates."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Ranks laid out as a box of pp x dp x tp.

    Neighbouring ranks differ in tp first, since tensor parallelism talks most and neighbours share a node's fast
    links, and in pp last (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, section 5.3).

    >>> mesh = Mesh(pp=2, dp=1, tp=2)
    >>> [mesh.place(rank) for rank in range(mesh.size)][2]
    Place(pp=1, dp=0, tp=0)
    >>> mesh.groups("pp")
    [(0, 2), (1, 3)]
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """How many ranks the mesh has."""
        return self.pp * self.dp * self.tp

    def place(self, rank: int) -> Place:
        """The coordinates of a rank."""
        assert 0 <= rank < self.size, f"rank {rank} is not in {self}"
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Place(pp, dp, tp)

    def rank(self, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates."""
        assert 0 <= pp < self.pp and 0 <= dp < self.dp and 0 <= tp < self.tp
        return (pp * self.dp + dp) * self.tp + tp

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks, this one among them, that differ from it along one axis only."""
        place = self.place(rank)
        size = getattr(self, axis)
        return tuple(self.rank(**{**place._asdict(), axis: i}) for i in range(size))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group along one axis. Each rank is in exactly one of them."""
        others = [name for name in AXES if name != axis]
        corners = product(*(range(getattr(self, name)) for name in others))
        firsts = [self.rank(**dict(zip(others, corner, strict=True))) for corner in corners]
        return [self.group(first, axis) for first in firsts]
