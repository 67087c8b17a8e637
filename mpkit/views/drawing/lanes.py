"""The lanes of a picture: what each rank and the clock are called, and how ranks are grouped by places in the mesh.

On a mesh with more than one axis, ranks with the same pp and dp form a group: together they hold and train one
stage of one replica. A group has a thin header; when folded, it shows its first rank's lane for all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpkit.plan.mesh import AXES, place_text
from mpkit.timeline.timeline import Timeline

FOLDED = 16
"""With more ranks than this, groups are folded at first."""


@dataclass(frozen=True)
class LaneGroup:
    """Ranks that belong together."""

    place: str  # what they share, such as "pp0 dp1"
    ranks: tuple[int, ...]  # ascending, without gaps

    @property
    def heading(self) -> str:
        """The header above all lanes of the group.

        >>> LaneGroup("pp0 dp1", (2, 3)).heading, LaneGroup("pp0", (0, 1, 2)).folded_heading
        ('pp0 dp1 · ranks 2, 3', 'pp0 · the first of ranks 0 to 2')
        """
        return f"{self.place} · {self._ranks}"

    @property
    def folded_heading(self) -> str:
        """The header above the first rank's lane, when the group is folded."""
        return f"{self.place} · the first of {self._ranks}" if len(self.ranks) > 1 else self.heading

    @property
    def _ranks(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        if len(self.ranks) < 3:
            return f"rank {first}" if first == last else f"ranks {first}, {last}"
        return f"ranks {first} to {last}"


def groups_of(timeline: Timeline) -> list[LaneGroup]:
    """Return the groups of a timeline's ranks; none on a mesh of one axis, or without a mesh."""
    mesh = timeline.mesh
    long = [axis for axis in AXES if mesh.degree(axis) > 1] if mesh else []
    if mesh is None or len(long) < 2:
        return []
    shared = [axis for axis in long[:-1] if axis in ("pp", "dp")] or long[:1]
    inner = [axis for axis in long if axis not in shared]
    names = [dict(zip(long, place_text(mesh, rank).split(), strict=True)) for rank in range(mesh.size)]
    return [
        LaneGroup(" ".join(names[ranks[0]][axis] for axis in shared), ranks) for ranks in mesh.groups(*inner)
    ]


def groups_trait(groups: Sequence[LaneGroup], ranks: int) -> list[dict[str, Any]]:
    """Return the groups in the form that the browser takes."""
    return [
        {
            "heading": group.heading,
            "folded_heading": group.folded_heading,
            "first": group.ranks[0],
            "count": len(group.ranks),
            "folded": ranks > FOLDED,
        }
        for group in groups
    ]


def rank_label(timeline: Timeline, rank: int) -> str:
    """Name a rank.

    On a mesh of several axes its place is included, "rank 5  pp1 dp0 tp1". Otherwise it is named after its device,
    "GPU 2", or "rank 2 (CPU)" if the run's ranks have no device of their own on this clock.
    """
    mesh = timeline.mesh
    if "imported" in timeline.meta:
        return f"rank {timeline.rank_number(rank)}"
    if mesh is not None and " " in place_text(mesh, rank):  # along several axes
        return f"rank {rank}  {place_text(mesh, rank)}"
    replayed = timeline.meta.get("hardware", "cpu") != "cpu"  # replayed on a machine other than the run's own
    on_cpu = timeline.meta.get("device") == "cpu" and timeline.clock != "simulated" and not replayed
    return f"rank {rank} (CPU)" if on_cpu else f"GPU {rank}"


def widest_label(timelines: Iterable[Timeline]) -> str:
    """Return the longest name of a rank, for pictures above each other whose axes begin at one place.

    >>> import mpkit as mk
    >>> widest_label([mk.simulate(mk.Plan.gpipe(2, 2)), mk.simulate(mk.Plan.gpipe(11, 2))])
    'GPU 10'
    """
    return max((rank_label(each, rank) for each in timelines for rank in range(each.world_size)), key=len)


def short_label(timeline: Timeline, rank: int) -> str:
    """Name a rank without its place."""
    return rank_label(timeline, rank).split("  ")[0]


CLOCKS = {
    "measured": "measured clock: the times of this machine's own clock",
    "virtual": "virtual clock: every rank replayed on a device of its own",
    "simulated": "simulated: from the schedule alone, nothing was run",
}
"""By `Timeline.clock`, for what mpkit ran itself."""


def clock_words(timeline: Timeline) -> str:
    """Return which clock the times are of; for a trace that other tools recorded also its files and device.

    >>> import mpkit as mk
    >>> clock_words(mk.simulate(mk.Plan.gpipe(2, 2)))
    'simulated: from the schedule alone, nothing was run'
    """
    words = CLOCKS.get(timeline.clock, timeline.clock)
    imported = timeline.meta.get("imported")
    if not imported:
        return words
    device = imported.get("gpu") or ("the CPU" if timeline.meta.get("device") == "cpu" else "its device")
    if timeline.clock == "measured":
        return f"measured clock: the times of {device} as recorded in {files_words(timeline)}"
    return f"{words}, with the operations of {files_words(timeline)} ({device})"


def files_words(timeline: Timeline) -> str:
    """Return the files that an imported trace is from, the first by its name; "" for mpkit's own."""
    files = (timeline.meta.get("imported") or {}).get("files", [])
    if not files:
        return ""
    return f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
