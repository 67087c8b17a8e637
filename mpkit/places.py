"""Placement: which rank holds which part of which layer, on which node it is, and who talks to whom over which link.

    pp   a rank holds the layers of its stages
    dp   replicas hold the same, or under ZeRO a shard of it
    cp   and so do those that share a sequence
    tp   of a divided layer a rank holds some rows or columns

Neighbouring ranks differ in tp first, so that what talks most stays within a node (Narayanan et al. 2021, section 5.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from mpkit.mesh import Mesh
from mpkit.shown import Drawn
from mpkit.whereabouts import long_axes
from mpkit.zero_shares import Share

if TYPE_CHECKING:
    from mpkit.devices import Hardware, Link

__all__ = ["Placement", "Talk", "brief", "place"]

Parts = Mapping[str, str | Sequence[str]]
"""By layer or parameter, what of it a tp rank holds: one text for all ("1/2 of its rows"), or one a place along tp."""


@dataclass(frozen=True)
class Talk:
    """Groups of an axis that talk over the same link.

    Attributes:
        axis: "tp", say.
        groups: of ranks; along pp, pairs of neighbours.
        link: over which; None where no hardware was given.
        crosses: whether it leads from node to node.
    """

    axis: str
    groups: tuple[tuple[int, ...], ...]
    link: Link | None
    crosses: bool


@dataclass(frozen=True, eq=False)
class Placement(Drawn):
    """Ranks in their places: prints as text, shows itself as a picture in a notebook.

    Attributes:
        mesh: of the ranks.
        stages: the names of the layers, by stage; none where no model is known.
        holders: by stage, the place along pp that holds it.
        shards: what tp divides; see `Parts`.
        hardware: with its nodes and links; None: not said.
        notes: what a reader should know.
        zero: the stage of ZeRO; 0: replicas hold the same.
        shares: under ZeRO, which elements of each parameter a replica updates; in stage 3 it holds no others.
    """

    mesh: Mesh
    stages: tuple[tuple[str, ...], ...] = ()
    holders: tuple[int, ...] = ()
    shards: Parts = field(default_factory=dict)
    hardware: Hardware | None = None
    notes: tuple[str, ...] = ()
    zero: int = 0
    shares: tuple[Share, ...] = ()

    @property
    def replicas(self) -> int:
        """How many ranks share what replicas would hold alike: dp x cp."""
        return self.mesh.dp * self.mesh.cp

    def stages_of(self, rank: int) -> list[int]:
        """The numbers of the stages that a rank holds."""
        place = self.mesh.place(rank).pp
        return [stage for stage, holder in enumerate(self.holders) if holder == place]

    def layers_of(self, rank: int) -> list[str]:
        """The names of the layers that a rank holds, or of which it holds a part."""
        return [name for stage in self.stages_of(rank) for name in self.stages[stage]] if self.stages else []

    def part(self, name: str, rank: int) -> str:
        """What of a divided layer a rank holds, in words; "" of one that is whole."""
        words = self.shards.get(name, "")
        return words if isinstance(words, str) else words[self.mesh.place(rank).tp]

    def node_of(self, rank: int) -> int:
        """The number of its node; 0 where no hardware was given."""
        return self.hardware.node_of(rank) if self.hardware else 0

    @property
    def nodes(self) -> list[tuple[int, ...]]:
        """The ranks by node."""
        numbers = [self.node_of(rank) for rank in range(self.mesh.size)]
        return [tuple(r for r, n in enumerate(numbers) if n == node) for node in sorted(set(numbers))]

    @property
    def talks(self) -> list[Talk]:
        """Who talks to whom over what, by axis, innermost first."""
        found = []
        for axis in reversed(long_axes(self.mesh)):
            groups = self.mesh.groups(axis)
            if axis == "pp":  # a stage talks to its neighbours only
                groups = [pair for group in groups for pair in pairwise(group)]
            for crosses in (False, True):
                some = tuple(g for g in groups if (len({self.node_of(rank) for rank in g}) > 1) == crosses)
                if some:
                    link = self.hardware.link_of(some[0]) if self.hardware else None
                    found.append(Talk(axis, some, link, crosses))
        return found

    def _svg(self) -> str:
        from mpkit.views.placement_svg import placement_svg

        return placement_svg(self)

    def __str__(self) -> str:
        from mpkit.views.placement_text import placement_text

        return placement_text(self)

    def __repr__(self) -> str:
        return f"<Placement of {self.mesh.size} ranks on {len(self.nodes)} node{'s' * (len(self.nodes) > 1)}>"


def place(
    mesh: Mesh,
    stages: Sequence[Sequence[str]] = (),
    shards: Parts | None = None,
    hardware: Hardware | str | None = None,
    *,
    holders: Sequence[int] | None = None,
    notes: Sequence[str] = (),
    zero: int = 0,
    shares: Sequence[Share] = (),
) -> Placement:
    """The placement of what is known already.

    >>> from mpkit.devices import Device, Hardware, Link
    >>> wires = Link("bus", 1e-6, 80e9), Link("network", 5e-6, 25e9)
    >>> toy = Hardware("toy", Device("d", {"float32": 1e12}, 1e11), *wires, per_node=2, nodes=2)
    >>> [(talk.axis, talk.groups, talk.link.name) for talk in place(Mesh(pp=2, tp=2), hardware=toy).talks]
    [('tp', ((0, 1), (2, 3)), 'bus'), ('pp', ((0, 2), (1, 3)), 'network')]

    Args:
        mesh: of the ranks.
        stages: the names of the layers, by stage.
        shards: what tp divides; see `Parts`.
        hardware: a catalogued machine's name, or a `Hardware`.
        holders: by stage, the place along pp that holds it; None: one after the other, over and over.
        notes: what a reader should know.
        zero, shares: as a Placement's.

    Raises:
        ValueError: a machine with fewer devices than ranks.
    """
    from mpkit.catalogue import hardware as find

    machine = None if hardware is None else find(hardware)
    if machine is not None and mesh.size > machine.devices and machine.name != "cpu":
        nodes = -(-mesh.size // machine.per_node)
        raise ValueError(
            f"placement(hardware={machine.name!r}): it has {machine.devices} devices, and the plan takes {mesh.size} "
            f"ranks. A larger one: dataclasses.replace(mk.hardware({machine.name!r}), nodes={nodes}, between=mk.Link("
            "'Ethernet', latency=20e-6, bandwidth=12.5e9))"
        )
    held = tuple(i % mesh.pp for i in range(len(stages))) if holders is None else tuple(holders)
    return Placement(
        mesh, tuple(map(tuple, stages)), held, shards or {}, machine, tuple(notes), zero, tuple(shares)
    )


def brief(names: Sequence[str]) -> str:
    """Names, with those that differ in a number only put together.

    >>> brief(["embed", "layers.0", "layers.1", "layers.2", "norm"])
    'embed, layers.0 to 2, norm'
    """
    runs: list[list[str]] = []
    for name in names:
        stem = name.rstrip("0123456789")
        if runs and stem != name and stem == runs[-1][-1].rstrip("0123456789"):
            runs[-1].append(name)
        else:
            runs.append([name])
    ends = [run[-1].removeprefix(run[0].rstrip("0123456789")) for run in runs]
    return ", ".join(
        run[0] if len(run) == 1 else f"{run[0]} to {end}" for run, end in zip(runs, ends, strict=True)
    )
