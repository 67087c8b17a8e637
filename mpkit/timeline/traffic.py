"""Who sends how much to whom: the bytes of a step from rank to rank, by axis of the mesh.

    message      the whole payload, from its sender to its receiver
    ring         all-reduce, all-gather, reduce-scatter, broadcast, reduce: each rank sends its share of the
                 ring's traffic (the wire factor times the payload) to the next rank of its group
    all pairs    all-to-all, scatter, gather: 1/n of the payload to each rank; of an all-to-all of uneven parts what was
                 recorded for each, or 1/n where that is not known, as in older traces

This is what the algorithms of the papers send. A backend may use another algorithm (NCCL uses a tree for few bytes).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mpkit.common.display import ChartedResult
from mpkit.devices.hardware import wire_factor
from mpkit.plan.mesh import AXIS_INKS, Mesh, axis_of, place_text
from mpkit.trace import Kind, Lane

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


@dataclass(frozen=True)
class Flow:
    """What one rank sends by one kind of communication in one group, all calls together.

    Attributes:
        rank: the sender.
        axis: the axis along which the group lies.
        kind: the kind of communication.
        calls: the number of calls.
        payload: bytes of the tensors.
        to: bytes by receiver, on the wire.
        even: bytes on the wire if each receiver got as much.
    """

    rank: int
    axis: str
    kind: Kind
    calls: int
    payload: int
    to: Mapping[int, float]
    even: float


def flows(timeline: Timeline) -> list[Flow]:
    """Return what the ranks sent in the last complete step, by axis, then rank. A receive counts as a send."""
    from mpkit.timeline import metrics

    mesh, listed = timeline.mesh, []
    steps = timeline.steps
    spans = timeline.spans[timeline.spans["step"] == steps[-1]] if steps else timeline.spans
    comm = metrics.active(spans)
    comm = comm[(comm["lane"] == Lane.COMM) & (comm["kind"] != Kind.RECV)]
    same = np.stack([comm[name] for name in ("rank", "kind", "group", "peer")])
    uneven = _uneven_parts(timeline, steps[-1] if steps else None)
    distinct, which = np.unique(same, axis=1, return_inverse=True)
    for number, (rank, kind, group, peer) in enumerate(distinct.T.tolist()):
        these = comm[which.reshape(-1) == number]
        members = members_of(timeline, kind, rank, group, peer)
        payload = int(these["bytes"].sum())
        shares = dict(sent_to(kind, members, rank, peer))
        known = {} if kind != Kind.ALL_TO_ALL else uneven.get((rank, group), {})
        rest = payload - sum(known.values())  # of calls with even parts
        to = {other: known.get(members.index(other), 0) + share * rest for other, share in shares.items()}
        even = payload * sum(shares.values())
        axis = axis_of(mesh, members, timeline.meta, exchange=kind == Kind.ALL_TO_ALL)
        listed.append(Flow(rank, axis, Kind(kind), len(these), payload, to, even))
    return sorted(listed, key=lambda flow: (_order(flow.axis), flow.rank, flow.kind))


def _uneven_parts(timeline: Timeline, step: int | None) -> dict[tuple[int, int], dict[int, int]]:
    """Return the bytes of a step by rank and group, and by place in the group; None: of all steps."""
    parts = timeline.sent_parts
    if step is not None:
        parts = parts[parts["step"] == step]
    found: dict[tuple[int, int], dict[int, int]] = {}
    for rank, group, member, nbytes in parts[["rank", "group", "member", "bytes"]].tolist():
        sent = found.setdefault((rank, group), {})
        sent[member] = sent.get(member, 0) + nbytes
    return found


def unknown_payloads(timeline: Timeline) -> int:
    """Return how many communications of the last complete step have bytes that an imported file does not tell."""
    if "imported" not in timeline.meta:
        return 0
    steps, spans = timeline.steps, timeline.spans
    comm = spans[(spans["lane"] == Lane.COMM) & (spans["kind"] != Kind.BARRIER) & (spans["bytes"] == 0)]
    return int((comm["step"] == steps[-1]).sum()) if steps else len(comm)


def sent_to(kind: int, members: tuple[int, ...], rank: int, peer: int = -1) -> Iterator[tuple[int, float]]:
    """Yield to whom a rank sends when its group communicates, and what fraction of the payload.

    >>> list(sent_to(Kind.ALL_REDUCE, (0, 1, 2, 3), rank=3)), list(sent_to(Kind.SEND, (0, 2), rank=0, peer=2))
    ([(0, 1.5)], [(2, 1.0)])
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
        # In a broadcast the last rank of the ring sends nothing; in a reduce the root sends nothing.
        if not (kind == Kind.BROADCAST and after == peer) and not (kind == Kind.REDUCE and rank == peer):
            yield after, wire_factor(kind, n)


def members_of(timeline: Timeline, kind: int, rank: int, group: int, peer: int) -> tuple[int, ...]:
    """Return the ranks that take part in a rank's call; `group` and `peer` are those of its span."""
    if kind in (Kind.SEND, Kind.RECV):
        return min(rank, peer), max(rank, peer)
    exchange = kind == Kind.ALL_TO_ALL
    return _members(timeline.names[group], timeline.world_size, timeline.mesh, rank, exchange=exchange)


def _members(
    group: str, ranks: int, mesh: Mesh | None, rank: int, *, exchange: bool = False
) -> tuple[int, ...]:
    """Return the ranks in a group's name, "0,1,2,3"; if it cannot be read, this rank alone."""
    members = tuple(int(part) for part in group.split(",") if part.isdigit() and int(part) < ranks)
    if rank not in members:  # a fake trace: this rank has the records of a rank that does the same elsewhere
        axis = axis_of(mesh, members, exchange=exchange) if members else ""
        members = mesh.group(rank, *axis.split(" x ")) if mesh and axis else (rank,)
    return members


def _order(axis: str) -> tuple[int, list[int]]:
    """Return a sort key that puts single axes first, in the order of the mesh."""
    names = [*AXIS_INKS]
    parts = [names.index(part) if part in names else len(names) for part in axis.split(" x ")]
    return len(parts), parts


@dataclass(frozen=True, eq=False)
class CommMatrix(ChartedResult):
    """Bytes from rank to rank: prints as tables, shows itself as heatmaps in a notebook.

    The chart (`figure`) has one heatmap per axis.

    Attributes:
        by_axis: (n, n) by the name of the axis ("tp"; "dp x cp" for groups that span both): bytes on the wire from the
            row's rank to the column's rank.
        places: each rank's place in the mesh, such as "pp0 tp1"; "" without a mesh.
        of: the step that was counted, such as "step 2"; "" if there are no steps.
        unknown: how many communications are left out, since the trace does not tell their bytes.
        mesh: the mesh of the ranks; None if it is not known.
    """

    by_axis: dict[str, npt.NDArray[np.float64]]
    places: list[str] = field(default_factory=list)
    of: str = ""
    unknown: int = 0
    mesh: Mesh | None = None

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
        where = f" in {self.of}" if self.of else ""
        left_out = f", without {self.unknown:,} communications of unknown bytes" if self.unknown else ""
        if self.by_axis:
            return f"Bytes from rank to rank{where}{left_out}"
        nobody = "Nobody is known to send bytes" if self.unknown else "Nobody sends any bytes"
        return f"{nobody}{where}{left_out}"

    def __repr__(self) -> str:
        return f"<CommMatrix of {len(self.places)} ranks along {', '.join(self.axes) or 'no axis'}>"


def comm_matrix(timeline: Timeline, axis: str | None = None) -> CommMatrix:
    """Return the matrix of a timeline's last complete step; see `Timeline.comm_matrix`."""
    n, mesh = timeline.world_size, timeline.mesh
    matrices: dict[str, npt.NDArray[np.float64]] = {}
    for flow in flows(timeline):
        matrix = matrices.setdefault(flow.axis, np.zeros((n, n)))
        for receiver, amount in flow.to.items():
            if 0 <= receiver < n:
                matrix[flow.rank, receiver] += amount
    matrices = {name: matrix for name, matrix in matrices.items() if matrix.any()}
    if axis is not None and axis not in matrices:
        there = ", ".join(map(repr, matrices)) or "none: nobody sends any bytes"
        raise ValueError(f"comm_matrix(axis={axis!r}): the axes with communication are {there}; None for all")
    steps = timeline.steps
    return CommMatrix(
        matrices if axis is None else {axis: matrices[axis]},
        [place_text(mesh, rank) if mesh else "" for rank in range(n)],
        f"step {steps[-1]}" if steps else "",
        unknown_payloads(timeline),
        mesh,
    )
