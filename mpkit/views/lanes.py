"""Which lanes a picture has: what each rank is called, and how ranks are grouped by their places in the mesh.

On a mesh with more than one axis the ranks with the same pp and dp are a group: what together holds and trains one
stage of one replica. A group has a thin header; folded, it shows its first rank's lane for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpkit.timeline import Timeline
from mpkit.whereabouts import long_axes, place_text

__all__ = ["FOLDED", "RankGroup", "groups_of", "groups_trait", "rank_label", "short_label"]

FOLDED = 16
"""Ranks above which groups are folded at first."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that belong together.

    Attributes:
        place: what they share, such as "pp0 dp1".
        ranks: ascending, without gaps.
    """

    place: str
    ranks: tuple[int, ...]

    @property
    def heading(self) -> str:
        """Over all of their lanes.

        >>> RankGroup("pp0 dp1", (2, 3)).heading, RankGroup("pp0", (0, 1, 2)).folded
        ('pp0 dp1 · ranks 2, 3', 'pp0 · the first of ranks 0 to 2')
        """
        return f"{self.place} · {self._ranks}"

    @property
    def folded(self) -> str:
        """Over the lane of the first."""
        return f"{self.place} · the first of {self._ranks}" if len(self.ranks) > 1 else self.heading

    @property
    def _ranks(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        if len(self.ranks) < 3:
            return f"rank {first}" if first == last else f"ranks {first}, {last}"
        return f"ranks {first} to {last}"


def groups_of(timeline: Timeline) -> list[RankGroup]:
    """The groups of a timeline's ranks; none on a mesh of one axis, or without a mesh."""
    mesh = timeline.mesh
    long = long_axes(mesh) if mesh else []
    if mesh is None or len(long) < 2:
        return []
    shared = [axis for axis in long[:-1] if axis in ("pp", "dp")] or long[:1]
    inner = [axis for axis in long if axis not in shared]
    names = [dict(zip(long, place_text(mesh, rank).split(), strict=True)) for rank in range(mesh.size)]
    return [
        RankGroup(" ".join(names[ranks[0]][axis] for axis in shared), ranks) for ranks in mesh.groups(*inner)
    ]


def groups_trait(groups: Sequence[RankGroup], ranks: int) -> list[dict[str, Any]]:
    """The groups as a browser takes them.

    Args:
        groups: of the ranks.
        ranks: how many there are.
    """
    return [
        {
            "heading": group.heading,
            "folded_heading": group.folded,
            "first": group.ranks[0],
            "count": len(group.ranks),
            "folded": ranks > FOLDED,
        }
        for group in groups
    ]


def rank_label(timeline: Timeline, rank: int) -> str:
    """What to call a rank: on a mesh of several axes by its place, "rank 5  pp1 dp0 tp1"; else its device, "GPU 2", or
    "rank 2 (CPU)" where the run's ranks have none on this clock.
    """
    mesh = timeline.mesh
    if mesh is not None and len(long_axes(mesh)) > 1:
        return f"rank {rank}  {place_text(mesh, rank)}"
    replayed = timeline.meta.get("hardware", "cpu") != "cpu"  # on a machine that is not the run's own
    on_cpu = timeline.meta.get("device") == "cpu" and timeline.clock != "simulated" and not replayed
    return f"rank {rank} (CPU)" if on_cpu else f"GPU {rank}"


def short_label(timeline: Timeline, rank: int) -> str:
    """The same, without its place."""
    return rank_label(timeline, rank).split("  ")[0]
