"""Mesh: which rank has which place along the axes; also the mesh of a run, read from its trace's meta.

The axes, outermost first: what the ranks along one divide, and what each holds of the parameters.

pp             the layers, into stages        those of its stages
dp             the samples of a batch         all; under ZeRO a shard
  dp_replicate   groups of replicas           all
  dp_shard       the replicas of a group      a shard
edp            the samples of a batch         the same experts; under ZeRO a shard
ep             the experts of each layer      some of the experts
cp             each sequence                  all; under ZeRO a shard
tp             each layer                     a part of every divided layer

If ZeRO shards within groups of replicas (hybrid sharding), dp consists of two axes: `dp_replicate` is outside of
`dp_shard`, so that the ranks that share shards are next to each other, on the fast links of a node.

Expert parallelism folds another mesh over the same ranks (Liu et al., "MoE Parallel Folding", arXiv 2504.14960, section
3): where the attention sees pp x dp x cp x tp, the experts see pp x edp x ep x tp. So ep ranks, each with some of a
layer's experts, are neighbours among the dp x cp replicas, and edp counts the replicas of an expert. With etp = tp each
expert is divided among the ranks along tp. With etp = 1 tp is folded too: the experts see pp x edp x ep, and neighbours
along tp divide experts.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

AXES = ("pp", "dp", "cp", "tp")  # the whole axes; the last varies fastest
HYBRID_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # in hybrid sharding
EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "tp")  # of the mesh that experts see

AXIS_INKS = {
    "pp": "#0072b2", "dp": "#009e73", "dp_replicate": "#56b4e9", "dp_shard": "#009e73", "edp": "#009e73",
    "ep": "#cc79a7", "cp": "#e69f00", "tp": "#d55e00",
}  # fmt: skip
"""The colour of each axis in pictures: Okabe and Ito's, legible on light and dark backgrounds."""


def join_axes(axes: Iterable[str]) -> str:
    """Return the name of several axes together; parts that make up a whole axis have its name."""
    return " x ".join(axes).replace("dp_replicate x dp_shard", "dp")


class Place(NamedTuple):
    """A rank's coordinates along the whole axes."""

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
        dp_replicate: the number of groups into which the replicas are divided; ZeRO shards within each.
        ep: the number of ranks, out of dp_shard x cp, among which the experts of a layer are divided.
        etp: 1 if ep counts the ranks along tp too; tp if each of these holds a part of every expert; 0 if they hold
            the same experts.

    >>> mesh = Mesh(pp=2, dp=1, tp=2)
    >>> [mesh.place(rank) for rank in range(mesh.size)][2]
    Place(pp=1, dp=0, cp=0, tp=0)
    >>> mesh.groups("pp"), mesh.groups("pp", "tp")
    ([(0, 2), (1, 3)], [(0, 1, 2, 3)])
    >>> hybrid = Mesh(dp=4, dp_replicate=2)
    >>> hybrid.groups("dp_shard"), hybrid.groups("dp_replicate"), hybrid.groups("dp")
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)])
    >>> Mesh(dp=2, tp=2, ep=2).groups("ep"), Mesh(dp=2, tp=2, ep=2, etp=1).groups("ep")
    ([(0, 2), (1, 3)], [(0, 1), (2, 3)])
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    dp_replicate: int = 1
    ep: int = 1
    etp: int = field(default=0, kw_only=True)

    def __repr__(self) -> str:
        names = [*AXES, *(name for name in ("dp_replicate", "ep") if getattr(self, name) > 1)]
        return f"Mesh({', '.join(f'{name}={self.degree(name)}' for name in names)})"

    def degree(self, axis: str) -> int:
        """Return the number of places along an axis."""
        return int(getattr(self, axis))

    @property
    def dp_shard(self) -> int:
        """The number of replicas in each group within which ZeRO shards."""
        return self.dp // self.dp_replicate

    @property
    def edp(self) -> int:
        """The number of replicas of an expert; in hybrid sharding, of each group."""
        return self.dp_shard * self.cp * (self.tp if self.folds else 1) // self.ep

    @property
    def folds(self) -> bool:
        """Whether ep counts the ranks along tp too."""
        return self.etp == 1

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of this mesh, outermost first: the parts of dp in hybrid sharding, else the whole axes."""
        return HYBRID_AXES if self.dp_replicate > 1 else AXES

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that experts see, outermost first."""
        return EXPERT_AXES[:-1] if self.folds else EXPERT_AXES

    @property
    def shape(self) -> tuple[int, ...]:
        """The degrees, in the order of `AXES`."""
        return self.pp, self.dp, self.cp, self.tp

    @property
    def size(self) -> int:
        """The number of ranks in the mesh."""
        return prod(self.shape)

    def place(self, rank: int) -> Place:
        """Return the coordinates of a rank along the whole axes."""
        assert 0 <= rank < self.size, f"rank {rank} is not in {self}"
        return Place(*_digits(rank, self.shape))

    def coordinates(self, rank: int, axes: Sequence[str] = ()) -> tuple[int, ...]:
        """Return the coordinates of a rank along `axes`; `expert_axes` may be given too."""
        return _digits(rank, map(self.degree, axes or self.axes))

    def rank_at(self, coordinates: Iterable[int], axes: Sequence[str] = ()) -> int:
        """Return the rank with these coordinates along `axes`; `expert_axes` may be given too."""
        number = 0
        for axis, i in zip(axes or self.axes, coordinates, strict=True):
            assert 0 <= i < self.degree(axis), f"place {i} along {axis} is not in {self}"
            number = number * self.degree(axis) + i
        return number

    def axes_with(self, *axes: str) -> tuple[str, ...]:
        """Return all axes of the mesh that these belong to: `expert_axes` if one of them is of experts, else `axes`."""
        return self.expert_axes if {"edp", "ep"}.intersection(axes) else self.axes

    def rank(self, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates."""
        return self.rank_at((pp, dp, cp, tp), AXES)

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks, in ascending order, that differ from this one along these axes only, itself included."""
        along, every = self.parts(*axes), self.axes_with(*axes)
        place = zip(every, self.coordinates(rank, every), strict=True)
        ways = [range(self.degree(axis)) if axis in along else (i,) for axis, i in place]
        return tuple(self.rank_at(each, every) for each in product(*ways))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return every group along these axes, sorted by first rank. Each rank is in exactly one of them."""
        return list(dict.fromkeys(self.group(rank, *axes) for rank in range(self.size)))

    def parts(self, *axes: str) -> tuple[str, ...]:
        """Return the axes of which these consist in this mesh, outermost first.

        Without hybrid sharding all replicas lie along dp_shard, and none along dp_replicate.

        >>> Mesh(dp=4, dp_replicate=2).parts("cp", "dp"), Mesh(dp=4).parts("dp_shard"), Mesh(dp=4).parts("dp_replicate")
        (('dp_replicate', 'dp_shard', 'cp'), ('dp',), ())
        """
        every = self.axes_with(*axes)
        if "edp" in every:
            return tuple(axis for axis in every if axis in axes)
        halves = {"dp_replicate", "dp_shard"}
        named = {*axes, *(halves if "dp" in axes else ())}
        if any(self.degree(axis) > 1 for axis in halves.intersection(axes)):
            named.add("dp")  # in a mesh whose dp is one axis
        return tuple(axis for axis in every if axis in named)

    def order(self, *outermost: str) -> tuple[int, ...]:
        """Return the ranks sorted by these axes first, so that ranks which differ along them are furthest apart.

        >>> Mesh(pp=2, dp=2, tp=2).order("tp")  # on two nodes, each has a half of every layer
        (0, 2, 4, 6, 1, 3, 5, 7)
        """
        places = [dict(zip(AXES, _digits(rank, self.shape), strict=True)) for rank in range(self.size)]
        return tuple(sorted(range(self.size), key=lambda rank: [places[rank][axis] for axis in outermost]))


def _digits(number: int, base: Iterable[int]) -> tuple[int, ...]:
    """Return the digits of a number in a mixed base, the last of which varies fastest."""
    digits = []
    for n in reversed(list(base)):
        number, digit = divmod(number, n)
        digits.append(digit)
    return tuple(reversed(digits))


WORLD = "world"  # the only axis of ranks that are in no mesh


def mesh_of(meta: Mapping[str, Any], ranks: int) -> Mesh | None:
    """Return the mesh of the plan in a trace's meta; None without a plan, or if its number of ranks differs.

    >>> mesh_of({"plan": '{"pp": 2, "tp": 2}'}, ranks=4)
    Mesh(pp=2, dp=1, cp=1, tp=2)
    """
    try:
        plan = json.loads(meta["plan"])
        degrees = {axis: int(plan.get(axis) or 1) for axis in (*AXES, "ep")}
        groups = degrees["dp"] // int(plan.get("dp_shard") or degrees["dp"])
        mesh = Mesh(**degrees, dp_replicate=groups, etp=plan.get("etp") or 0)
    except (KeyError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        return None
    return mesh if mesh.size == ranks else None


def long_axes(mesh: Mesh) -> list[str]:
    """List the axes with more than one place, outermost first; parts of an axis by themselves."""
    return [axis for axis in mesh.axes if mesh.degree(axis) > 1]


def axis_of(
    mesh: Mesh | None, ranks: Iterable[int], meta: Mapping[str, Any] | None = None, *, exchange: bool = False
) -> str:
    """Return the axis along which these ranks lie: the axes in which their coordinates differ.

    Ranks that divide experts lie along "ep" for an `exchange`, an all-to-all, and those that hold the same experts lie
    along "edp"; both lie along axes of the replicas too. Without a plan's mesh it is the name in the meta that the
    program's own DeviceMesh gave to the group.

    >>> mesh = Mesh(pp=2, dp=2, tp=2)
    >>> axis_of(mesh, (0, 1)), axis_of(mesh, (0, 4)), axis_of(mesh, range(8))
    ('tp', 'pp', 'pp x dp x tp')
    >>> axis_of(Mesh(dp=4, dp_replicate=2), (0, 2)), axis_of(Mesh(dp=4, dp_replicate=2), range(4))
    ('dp_replicate', 'dp')
    >>> folded = Mesh(dp=4, ep=2)
    >>> axis_of(folded, (0, 1), exchange=True), axis_of(folded, (0, 2)), axis_of(folded, range(4))
    ('ep', 'edp', 'dp')
    >>> axis_of(None, (0, 1), {"axes": {"0,1": "tp"}})
    'tp'
    """
    if mesh is None:
        named = (meta or {}).get("axes", {})
        return str(named.get(",".join(map(str, ranks)), WORLD))
    ranks = tuple(ranks)
    for axis in ("ep",) if exchange else ("edp",):
        if mesh.ep > 1 and len(ranks) > 1 and ranks == mesh.group(ranks[0], axis):
            return axis
    places = [mesh.coordinates(rank) for rank in ranks]
    differ = [axis for i, axis in enumerate(mesh.axes) if len({place[i] for place in places}) > 1]
    return join_axes(differ) or WORLD


def place_text(mesh: Mesh, rank: int) -> str:
    """Return a rank's coordinates along the whole axes with more than one place, such as "pp1 dp0 tp1"."""
    places = zip(AXES, mesh.shape, mesh.place(rank), strict=True)
    return " ".join(f"{axis}{place}" for axis, degree, place in places if degree > 1)
