"""Mesh: which rank has which place along the axes pp, dp, cp and tp. Pure integers.

`TABLE` has a row per axis, outermost first. dp consists of two axes where ZeRO shards within groups of replicas
(hybrid sharding): `dp_replicate` is outside of `dp_shard`, so that the ranks that share shards are next to each other,
on the fast links of a node.

Expert parallelism folds another mesh over the same ranks (Liu et al., "MoE Parallel Folding", arXiv 2504.14960, section
3): where the attention sees pp x dp x cp x tp, the experts see pp x edp x ep x tp. So ep ranks, each with some of a
layer's experts, are neighbours among the dp x cp replicas, and edp counts the replicas of an expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

__all__ = ["AXES", "EXPERT_AXES", "TABLE", "Axis", "Mesh", "Place", "join_axes", "ulysses_degree"]


class Axis(NamedTuple):
    """An axis of the mesh.

    Attributes:
        name: its name in a Plan, in groups and in pictures.
        divides: what its ranks divide among themselves.
        parameters: what its ranks hold of the parameters.
        ink: its colour in pictures: Okabe and Ito's, legible on light and dark backgrounds.
        within: the axis that it is a part of; "" if it is whole.
        of_experts: whether it is an axis of the mesh that the experts see.
    """

    name: str
    divides: str
    parameters: str
    ink: str
    within: str = ""
    of_experts: bool = False


TABLE = (
    Axis("pp", "the layers, into stages", "each those of its stages", "#0072b2"),
    Axis("dp", "the samples of a batch", "all the same; under ZeRO each a shard", "#009e73"),
    Axis("dp_replicate", "the samples of a batch", "all the same", "#56b4e9", within="dp"),
    Axis("dp_shard", "the samples of a batch", "each a shard", "#009e73", within="dp"),
    Axis("edp", "the samples of a batch", "the same experts; under ZeRO a shard", "#009e73", of_experts=True),
    Axis("ep", "the experts of each layer", "each some of the experts", "#cc79a7", of_experts=True),
    Axis("cp", "each sequence", "all the same; under ZeRO each a shard", "#e69f00"),
    Axis("cp_ring", "each sequence", "all the same; under ZeRO each a shard", "#e69f00", within="cp"),
    Axis(
        "cp_ulysses",
        "each sequence; for attention the heads",
        "all the same; under ZeRO each a shard",
        "#cc79a7",
        within="cp",
    ),
    Axis("tp", "each layer", "each a part of every divided layer", "#d55e00"),
)
"""The axes, outermost first; the last varies fastest."""

AXES = tuple(axis.name for axis in TABLE if not axis.within and not axis.of_experts)
"""The names of the whole axes."""

EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "tp")
"""The axes of the mesh that experts see, outermost first."""


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
    Megatron-LM", SC 2021, section 3.2).

    Attributes:
        pp, dp, cp, tp: the degrees.
        dp_replicate: the number of groups into which the replicas are divided; ZeRO shards within each.
        ep: the number of ranks, out of dp_shard x cp, among which the experts of a layer are divided.
        cp_ulysses: the number of ranks, out of cp, that divide the heads for attention; cp / cp_ulysses are in a ring.
        dp_secondary: the number of neighbouring replicas among which ZeRO-3's backward gathers (hpZ); 0: all.

    >>> mesh = Mesh(pp=2, dp=1, tp=2)
    >>> [mesh.place(rank) for rank in range(mesh.size)][2]
    Place(pp=1, dp=0, cp=0, tp=0)
    >>> mesh.groups("pp")
    [(0, 2), (1, 3)]
    >>> mesh.groups("pp", "tp")
    [(0, 1, 2, 3)]
    >>> hybrid = Mesh(dp=4, dp_replicate=2)
    >>> hybrid.groups("dp_shard"), hybrid.groups("dp_replicate"), hybrid.groups("dp")
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)])
    >>> folded = Mesh(dp=2, cp=2, ep=2)
    >>> folded.groups("ep"), folded.groups("edp"), folded.groups("cp")
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1), (2, 3)])
    >>> long = Mesh(cp=4, cp_ulysses=2)
    >>> long.groups("cp_ulysses"), long.groups("cp_ring")
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    dp_replicate: int = 1
    ep: int = 1
    cp_ulysses: int = 1
    dp_secondary: int = 0

    def __repr__(self) -> str:
        names = [*AXES, *(name for name in ("dp_replicate", "ep", "cp_ulysses") if getattr(self, name) > 1)]
        return f"Mesh({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    @property
    def dp_shard(self) -> int:
        """The number of replicas in each group within which ZeRO shards."""
        return self.dp // self.dp_replicate

    @property
    def cp_ring(self) -> int:
        """The number of ranks in each ring, around which keys and values go."""
        return self.cp // self.cp_ulysses

    @property
    def in_groups(self) -> Mesh:
        """The mesh whose ranks along dp_shard and cp keep secondary shards together.

        >>> Mesh(dp=4, dp_secondary=2).in_groups.groups("dp_shard", "cp")
        [(0, 1), (2, 3)]
        """
        return replace(self, dp_replicate=self.dp // self.dp_secondary, ep=1, dp_secondary=0)

    @property
    def edp(self) -> int:
        """The number of replicas of an expert; in hybrid sharding, of each group."""
        return self.dp_shard * self.cp // self.ep

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that no other axis of this mesh is a part of, outermost first.

        >>> Mesh(dp=4).axes, Mesh(dp=4, dp_replicate=2).axes
        (('pp', 'dp', 'cp', 'tp'), ('pp', 'dp_replicate', 'dp_shard', 'cp', 'tp'))
        """
        divided = {"dp"} if self.dp_replicate > 1 else set()
        divided |= {"cp"} if 1 < self.cp_ulysses < self.cp else set()
        return tuple(
            axis.name
            for axis in TABLE
            if axis.name not in divided
            and not axis.of_experts
            and (not axis.within or axis.within in divided)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The degrees, in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def size(self) -> int:
        """The number of ranks in the mesh."""
        return prod(self.shape)

    def place(self, rank: int) -> Place:
        """Return the coordinates of a rank along the whole axes."""
        assert 0 <= rank < self.size, f"rank {rank} is not in {self}"
        return Place(*_digits(rank, self.shape))

    def coordinates(self, rank: int, axes: Sequence[str] = ()) -> tuple[int, ...]:
        """Return the coordinates of a rank along `axes`, or along `EXPERT_AXES` if these are given."""
        return _digits(rank, [getattr(self, axis) for axis in axes or self.axes])

    def rank_at(self, coordinates: Iterable[int], axes: Sequence[str] = ()) -> int:
        """Return the rank with these coordinates along `axes`, or along `EXPERT_AXES` if these are given."""
        number = 0
        for axis, i in zip(axes or self.axes, coordinates, strict=True):
            number = number * getattr(self, axis) + i
        return number

    def axes_with(self, *axes: str) -> tuple[str, ...]:
        """Return all axes of the mesh that these belong to: `EXPERT_AXES` if one of them is of experts, else `axes`."""
        return EXPERT_AXES if any(axis.name in axes for axis in TABLE if axis.of_experts) else self.axes

    def rank(self, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates along the whole axes."""
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
        along, every = self.parts(*axes), self.axes_with(*axes)
        ways = [
            range(getattr(self, axis)) if axis in along else (i,)
            for axis, i in zip(every, self.coordinates(rank, every), strict=True)
        ]
        return tuple(self.rank_at(each, every) for each in product(*ways))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return every group along these axes, sorted by first rank. Each rank is in exactly one of them."""
        groups = dict.fromkeys(self.group(rank, *axes) for rank in range(self.size))
        return list(groups)

    def parts(self, *axes: str) -> tuple[str, ...]:
        """Return the axes of which these consist in this mesh, outermost first.

        An axis that is not divided lies along its part that has as many places: a mesh whose replicas are not divided
        into groups has all of them along dp_shard, and none along dp_replicate.

        >>> Mesh(dp=4, dp_replicate=2).parts("cp", "dp"), Mesh(dp=4).parts("dp_shard"), Mesh(dp=4).parts("dp_replicate")
        (('dp_replicate', 'dp_shard', 'cp'), ('dp',), ())
        """
        if self.axes_with(*axes) is EXPERT_AXES:
            return tuple(axis for axis in EXPERT_AXES if axis in axes)
        long = {axis.within for axis in TABLE if axis.name in axes and getattr(self, axis.name) > 1}
        named = {*axes, *long.intersection(self.axes)}
        return tuple(
            axis.name
            for axis in TABLE
            if axis.name in self.axes and not named.isdisjoint({axis.name, axis.within})
        )

    def order(self, *outermost: str) -> tuple[int, ...]:
        """Return the ranks sorted by their coordinates along these axes first.

        Ranks that differ along these axes are then furthest apart.

        >>> Mesh(pp=2, dp=2, tp=2).order("tp")  # on two nodes, each has a half of every layer
        (0, 2, 4, 6, 1, 3, 5, 7)
        """
        return tuple(
            sorted(range(self.size), key=lambda rank: [getattr(self.place(rank), axis) for axis in outermost])
        )


def join_axes(axes: Iterable[str]) -> str:
    """Return the name of several axes together; parts that make up a whole axis have its name.

    >>> join_axes(["pp", "dp_replicate", "dp_shard"])
    'pp x dp'
    """
    names = list(axes)
    for whole in AXES:
        parts = [axis.name for axis in TABLE if axis.within == whole]
        if parts and all(part in names for part in parts):
            names[names.index(parts[0])] = whole
            names = [name for name in names if name not in parts]
    return " x ".join(names)


def ulysses_degree(cp_method: object, cp: int) -> int:
    """Return how many of the cp ranks of a sequence divide the heads for attention, by a Plan's cp_method.

    >>> [ulysses_degree(method, 8) for method in ("ring", "ulysses", (2, 4))]
    [1, 8, 2]
    """
    if isinstance(cp_method, (tuple, list)):
        return int(cp_method[0])
    return cp if cp_method == "ulysses" else 1


def _digits(number: int, base: Iterable[int]) -> tuple[int, ...]:
    """Return the digits of a number in a mixed base, the last of which varies fastest."""
    digits = []
    for n in reversed(list(base)):
        number, digit = divmod(number, n)
        digits.append(digit)
    return tuple(reversed(digits))
