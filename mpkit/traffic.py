"""Who sends how much to whom: the bytes of a step from rank to rank, by axis of the mesh.

    message      all of it, from its sender to its receiver
    ring         all-reduce, all-gather, reduce-scatter, broadcast, reduce: each rank sends what the ring makes it
                 send (the wire factor times the payload) to the next one of its group
    all pairs    all-to-all, scatter, gather: an n-th of the payload to each

This is what the algorithms of the papers send. A backend is free to take another way (NCCL a tree, for few bytes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpkit.devices import wire_factor
from mpkit.mesh import AXES, Mesh
from mpkit.shown import Charted, data_frame
from mpkit.trace import Kind, Lane
from mpkit.whereabouts import axis_of, place_text

if TYPE_CHECKING:
    import pandas as pd

    from mpkit.timeline import Timeline

__all__ = ["CommMatrix", "Flow", "comm_matrix", "flows", "sent_to"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Flow:
    """What one rank sends by one kind of communication in one group, all calls together.

    Attributes:
        rank: who sends.
        axis: along which the group lies.
        kind: of communication.
        calls: how often.
        payload: bytes of the tensors.
        to: bytes by receiver, on the wire.
    """

    rank: int
    axis: str
    kind: Kind
    calls: int
    payload: int
    to: Mapping[int, float]


def flows(timeline: Timeline) -> list[Flow]:
    """What the ranks sent in the last complete step, by axis, then rank; receives are the senders' sends."""
    from mpkit import metrics

    mesh, found = timeline.mesh, []
    steps = timeline.steps
    spans = timeline.spans[timeline.spans["step"] == steps[-1]] if steps else timeline.spans
    comm = metrics.active(spans)
    comm = comm[(comm["lane"] == Lane.COMM) & (comm["kind"] != Kind.RECV)]
    same = np.stack([comm[name] for name in ("rank", "kind", "group", "peer")])
    distinct, which = np.unique(same, axis=1, return_inverse=True)
    for number, (rank, kind, group, peer) in enumerate(distinct.T.tolist()):
        these = comm[which.reshape(-1) == number]
        members: tuple[int, ...] = (min(rank, peer), max(rank, peer))
        if kind != Kind.SEND:
            members = _members(timeline.names[group], timeline.world_size, mesh, rank)
        payload = int(these["bytes"].sum())
        to = {other: share * payload for other, share in sent_to(kind, members, rank, peer)}
        found.append(Flow(rank, axis_of(mesh, members), Kind(kind), len(these), payload, to))
    return sorted(found, key=lambda flow: (_order(flow.axis), flow.rank, flow.kind))


def sent_to(kind: int, members: tuple[int, ...], rank: int, peer: int = -1) -> Iterator[tuple[int, float]]:
    """To whom a rank sends when its group communicates, and what share of the payload.

    >>> list(sent_to(Kind.ALL_REDUCE, (0, 1, 2, 3), rank=3)), list(sent_to(Kind.SEND, (0, 2), rank=0, peer=2))
    ([(0, 1.5)], [(2, 1.0)])

    Args:
        kind: of communication.
        members: of its group, ascending; of a message both ends.
        rank: who sends.
        peer: the message's other end, or the collective's root.
    """
    n = len(members)
    if kind == Kind.SEND:
        yield peer, 1.0
    elif kind in (Kind.ALL_TO_ALL, Kind.SCATTER):
        if kind == Kind.ALL_TO_ALL or rank == peer:
            yield from ((other, 1.0 / n) for other in members if other != rank)
    elif kind == Kind.GATHER:
        if rank != peer:
            yield peer, 1.0 / n
    elif n > 1 and kind != Kind.BARRIER:
        after = members[(members.index(rank) + 1) % n]
        # From a root the last of the ring sends to nobody; towards one, the root does not.
        if not (kind == Kind.BROADCAST and after == peer) and not (kind == Kind.REDUCE and rank == peer):
            yield after, wire_factor(kind, n)


def _members(group: str, ranks: int, mesh: Mesh | None, rank: int) -> tuple[int, ...]:
    """The ranks of a group by its name, "0,1,2,3"; of one that cannot be read this rank alone."""
    members = tuple(int(part) for part in group.split(",") if part.isdigit() and int(part) < ranks)
    if rank not in members:  # a played trace: this rank has the records of one that does the same elsewhere
        members = mesh.group(rank, *axis_of(mesh, members).split(" x ")) if mesh and members else (rank,)
    return members


def _order(axis: str) -> tuple[int, list[int]]:
    """Single axes first, as the mesh has them."""
    parts = [AXES.index(part) for part in axis.split(" x ") if part in AXES]
    return len(parts), parts


@dataclass(frozen=True, eq=False)
class CommMatrix(Charted):
    """Bytes from rank to rank: prints as tables, shows itself as heatmaps in a notebook.

    Attributes:
        by_axis: (n, n) by the name of the axis ("tp"; "dp x cp" of groups that span both): bytes on the wire from the
            row's rank to the column's.
        places: by rank, where in the mesh it is, such as "pp0 tp1"; "" without a mesh.
        of: which step they are of, such as "step 2"; "" where there are no steps.
    """

    by_axis: dict[str, npt.NDArray[np.float64]]
    places: list[str] = field(default_factory=list)
    of: str = ""

    @property
    def axes(self) -> list[str]:
        """Along which there is communication."""
        return list(self.by_axis)

    @property
    def bytes(self) -> npt.NDArray[np.float64]:
        """(n, n): of all axes together."""
        return sum(self.by_axis.values(), np.zeros((len(self.places), len(self.places))))

    @property
    def title(self) -> str:
        """What it is, in words."""
        return f"Bytes from rank to rank{' in ' + self.of if self.of else ''}"

    def to_dataframe(self) -> pd.DataFrame:
        """A row a pair of ranks that talk: axis, sender, receiver, bytes.

        Raises:
            ImportError: pandas is not installed.
        """
        rows = [
            (axis, sender, receiver, matrix[sender, receiver])
            for axis, matrix in self.by_axis.items()
            for sender, receiver in np.argwhere(matrix > 0).tolist()
        ]
        return data_frame(rows, columns=["axis", "sender", "receiver", "bytes"])

    def figure(self) -> Any:
        """A heatmap an axis, a plotly Figure.

        Raises:
            ImportError: plotly is not installed.
        """
        from mpkit.views.traffic import traffic_figure

        return traffic_figure(self)

    def _svg(self) -> str:
        from mpkit.views.traffic_svg import traffic_svg

        return traffic_svg(self)

    def __str__(self) -> str:
        from mpkit.views.traffic_text import traffic_text

        return traffic_text(self)

    def __repr__(self) -> str:
        return f"<CommMatrix of {len(self.places)} ranks along {', '.join(self.axes) or 'no axis'}>"


def comm_matrix(timeline: Timeline, axis: str | None = None) -> CommMatrix:
    """The matrix of a timeline's last complete step; see `Timeline.comm_matrix`."""
    n, mesh = timeline.world_size, timeline.mesh
    found: dict[str, npt.NDArray[np.float64]] = {}
    for flow in flows(timeline):
        matrix = found.setdefault(flow.axis, np.zeros((n, n)))
        for receiver, amount in flow.to.items():
            if 0 <= receiver < n:
                matrix[flow.rank, receiver] += amount
    found = {name: matrix for name, matrix in found.items() if matrix.any()}
    if axis is not None and axis not in found:
        there = ", ".join(map(repr, found)) or "none: nobody sends any bytes"
        raise ValueError(f"comm_matrix(axis={axis!r}): the axes with communication are {there}; None for all")
    steps = timeline.steps
    return CommMatrix(
        found if axis is None else {axis: found[axis]},
        [place_text(mesh, rank) if mesh else "" for rank in range(n)],
        f"step {steps[-1]}" if steps else "",
    )
