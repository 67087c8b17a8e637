"""Who sends how much to whom in a step: from rank to rank, per rank beside the formulas, and tokens to their experts.

    message      the whole payload, from its sender to its receiver
    ring         all-reduce, all-gather, reduce-scatter, broadcast, reduce: each rank sends its share of the
                 ring's traffic (the wire factor times the payload) to the next rank of its group
    all pairs    all-to-all, scatter, gather: 1/n of the payload to each rank; of an all-to-all of uneven parts what was
                 recorded for each, or 1/n where that is not known, as in older traces

This is what the algorithms of the papers send. A backend may use another algorithm (NCCL uses a tree for few bytes).

Rows of tokens that travel to experts (all-to-alls along ep) are counted as they were sent and returned. The formula has
uniform routing, by which (n-1)/n of the rows leave their rank (Lepikhin et al., "GShard", ICLR 2021, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mpkit.common.display import ChartedResult, DrawnResult, draw
from mpkit.common.units import percent
from mpkit.devices.hardware import wire_factor
from mpkit.plan.mesh import AXIS_INKS, Mesh, axis_of, mesh_of, place_text
from mpkit.timeline.formulas import FormulaInputs, formula_of
from mpkit.timeline.metrics import active
from mpkit.trace import Kind, Lane

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline
    from mpkit.trace import Trace
    from mpkit.trace.expert_load import Rows


@dataclass(frozen=True)
class Flow:
    """What one rank sends by one kind of communication in one group, all calls together."""

    rank: int  # the sender
    axis: str  # along which the group lies
    kind: Kind
    calls: int
    payload: int  # bytes of the tensors
    to: Mapping[int, float]  # bytes by receiver, on the wire
    even: float  # bytes on the wire if each receiver got as much


def flows(timeline: Timeline) -> list[Flow]:
    """Return what the ranks sent in the last complete step, by axis, then rank. A receive counts as a send."""
    mesh, listed = timeline.mesh, []
    steps = timeline.steps
    spans = timeline.spans[timeline.spans["step"] == steps[-1]] if steps else timeline.spans
    comm = active(spans)
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
    """Count the communications of the last complete step whose bytes an imported file does not tell."""
    if "imported" not in timeline.meta:
        return 0
    steps, spans = timeline.steps, timeline.spans
    comm = spans[(spans["lane"] == Lane.COMM) & (spans["kind"] != Kind.BARRIER) & (spans["bytes"] == 0)]
    return int((comm["step"] == steps[-1]).sum()) if steps else len(comm)


def sent_to(kind: int, members: tuple[int, ...], rank: int, peer: int = -1) -> Iterator[tuple[int, float]]:
    """Yield the receivers of what a rank sends when its group communicates, with their fraction of the payload.

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
    mesh, name = timeline.mesh, timeline.names[group]  # such as "0,1,2,3"
    members = tuple(
        int(part) for part in name.split(",") if part.isdigit() and int(part) < timeline.world_size
    )
    if rank not in members:  # a fake trace: this rank has the records of a rank that does the same elsewhere
        axis = axis_of(mesh, members, exchange=kind == Kind.ALL_TO_ALL) if members else ""
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


@dataclass(frozen=True)
class VolumeRow:
    """What a rank sends in a step by one kind of communication along one axis.

    Attributes:
        axis: such as "tp", or "dp x cp" for groups that span both.
        kind: the kind of communication, such as "all_reduce".
        calls: the number of calls.
        payload: bytes of the tensors of all calls.
        wire: bytes that the rank sends for them.
        symbols: the formula, in elements; "" if there is none.
        words: what is sent according to the formula.
        expected: bytes on the wire according to the formula; None if there is none or its inputs are not known.
        even: bytes on the wire if each rank of an all-to-all got as much of its payload.
    """

    axis: str
    kind: str
    calls: float
    payload: float
    wire: float
    symbols: str = ""
    words: str = ""
    expected: float | None = None
    even: float = 0.0

    @property
    def ratio(self) -> float | None:
        """The bytes sent divided by those that the formula expects."""
        return self.wire / self.expected if self.expected else None

    @property
    def moved_more(self) -> float:
        """How many more bytes left the rank along ep than if it sent as much to each, as a share."""
        is_of_rows = self.axis == "ep" and self.kind == Kind.ALL_TO_ALL.word
        return self.wire / self.even - 1 if is_of_rows and self.even else 0.0


@dataclass(frozen=True, repr=False)
class CommVolume:
    """What a rank sends in a step; it prints as a table, and shows one in a notebook.

    Attributes:
        rows: one row per axis and kind.
        of: the rank and the step, in words.
        unknown: how many communications are left out, since the trace does not tell their bytes.
        mesh: the mesh of the ranks; None if it is not known.
        rank: whose volume it is; None for the average of all.
    """

    rows: tuple[VolumeRow, ...]
    of: str
    unknown: int = 0
    mesh: Mesh | None = None
    rank: int | None = None

    @property
    def note(self) -> str:
        """How many more or fewer rows left for their experts than the formula says; "" if as many did."""
        moved = next((each for row in self.rows if abs(each := row.moved_more) > 1e-3), 0.0)
        whose = "a rank's rows" if self.rank is None else f"the rows of rank {self.rank}"
        if not moved:
            return ""
        return (
            f"ep: of {whose} {percent(abs(moved))} {'more' if moved > 0 else 'fewer'} left than under uniform routing, "
            "which the formula has; comm_matrix('ep') has each pair of ranks."
        )

    def __str__(self) -> str:
        return str(draw(self, "text"))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return str(draw(self, "html"))


def comm_volume(timeline: Timeline, rank: int | None = None) -> CommVolume:
    """Return the volume of a timeline's last complete step; see `Timeline.comm_volume`."""
    n, steps = timeline.world_size, timeline.steps
    if rank is not None and rank not in range(n):
        raise ValueError(
            f"comm_volume(rank={rank!r}): this timeline has ranks 0 to {n - 1}; None for their average"
        )
    ranks = range(n) if rank is None else [rank]
    known = FormulaInputs.from_meta(timeline.meta, n)
    groups: dict[tuple[str, Kind], list[Flow]] = {}
    for flow in flows(timeline):
        if flow.rank in ranks and flow.payload:
            groups.setdefault((flow.axis, flow.kind), []).append(flow)
    rows = []
    for (axis, kind), mine in groups.items():
        formula = formula_of(known, axis, kind)
        sums = zip(
            *((each.calls, each.payload, sum(each.to.values()), each.even) for each in mine), strict=True
        )
        calls, payload, wire, even = (sum(each) / len(ranks) for each in sums)
        symbols, words = ("", "") if formula is None else formula[:2]
        expected = None if formula is None else sum(map(formula.of, ranks)) / len(ranks)
        rows.append(VolumeRow(axis, kind.word, calls, payload, wire, symbols, words, expected, even))
    whose = f"a rank sends, on average over {n}" if rank is None else f"rank {rank} sends"
    unknown = unknown_payloads(timeline)
    where = f", in step {steps[-1]}" if steps else ""
    where += f", without {unknown:,} communications of unknown bytes" if unknown else ""
    return CommVolume(tuple(rows), f"What {whose}{where}", unknown, timeline.mesh, rank)


@dataclass(frozen=True, eq=False)
class TokenRoutes(DrawnResult):
    """The rows of one layer in one step: prints as a matrix, and shows itself as ribbons from rank to rank.

    >>> routes = TokenRoutes("block0", 3, (0, 1), np.array([[3.0, 1.0], [4.0, 0.0]]), ((0, 1), (0, 1)))
    >>> routes.matrix.tolist(), routes.moved_share
    ([[3.0, 1.0], [4.0, 0.0]], 0.625)

    Attributes:
        layer: the layer's name.
        step: the number of the step.
        ranks: those that have tokens for this layer.
        rows: [ranks, E], how many rows of each rank's tokens each expert computed.
        owners: [ranks, E], the rank that computed them.
    """

    layer: str
    step: int
    ranks: tuple[int, ...]
    rows: Rows
    owners: tuple[tuple[int, ...], ...]

    @property
    def matrix(self) -> Rows:
        """[ranks, ranks]: how many rows each rank sent to the experts of each other one, and to its own."""
        matrix = np.zeros((len(self.ranks), len(self.ranks)))
        for sender, owners in enumerate(self.owners):
            np.add.at(matrix[sender], [self.ranks.index(owner) for owner in owners], self.rows[sender])
        return matrix

    @property
    def moved_share(self) -> float:
        """The share of rows that another rank computed."""
        matrix = self.matrix
        return float(1 - np.trace(matrix) / max(matrix.sum(), 1.0))

    __repr__ = DrawnResult.__str__


def token_routes(trace: Trace, layer: str = "", step: int = -1) -> TokenRoutes:
    """Return where the tokens of a step went.

    Args:
        trace: of a run whose model has experts.
        layer: a part of the layer's name; "": the first layer.
        step: the step's place among those that were counted; -1: the last one.

    Raises:
        ValueError: no rows were counted, or there is no such layer or step; the message lists those that exist.
    """
    if not isinstance(layer, str):
        raise ValueError(
            f"token_routes({layer!r}): a layer is a name or a part of one, as in token_routes('block1', 2)"
        )
    load = trace.expert_load
    names = [name for name in load.sent if layer in name]
    exact = [name for name in names if name in (layer, f"{layer}.mlp.experts")]
    if not names or (layer and len(names) > 1 and not exact):
        raise ValueError(
            f"token_routes({layer!r}): {'several layers are' if names else 'no layer is'} called so; the layers with "
            f"experts are {', '.join(load.sent)}"
        )
    name = (exact or names)[0]
    sent = load.sent[name]
    if not -len(sent) <= step < len(sent):
        raise ValueError(f"token_routes(step={step}): the trace has {len(sent)} steps, 0 to {len(sent) - 1}")
    mesh, columns = mesh_of(trace.meta, trace.world_size), sent.shape[2]
    counted = [int(rank) for rank in np.flatnonzero(sent.sum(axis=(0, 2)))]
    groups = {rank: (rank,) if mesh is None or mesh.ep == 1 else mesh.group(rank, "ep") for rank in counted}
    ranks = tuple(sorted({rank for group in groups.values() for rank in group}))
    of = [groups.get(rank, (rank,)) for rank in ranks]
    owners = tuple(tuple(group[at * len(group) // columns] for at in range(columns)) for group in of)
    number = load.first + step % len(sent)
    return TokenRoutes(name, number, ranks, sent[step][list(ranks)], owners)
