"""How much a rank sends in a step, by axis and kind, beside what the formulas say (`mpkit.timeline.formulas`).

Rows of tokens that travel to experts (all-to-alls along ep) are counted as they were sent and returned. The formula has
uniform routing; the note says how many more or fewer than 1 - 1/ep of a step's rows left their rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpkit.common.display import draw
from mpkit.common.units import percent
from mpkit.plan.mesh import Mesh
from mpkit.timeline.formulas import FormulaInputs, formula_of
from mpkit.timeline.traffic import Flow, flows, unknown_payloads
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


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
    where = (f", in step {steps[-1]}" if steps else "") + (
        f", without {unknown:,} communications of unknown bytes" if unknown else ""
    )
    return CommVolume(tuple(rows), f"What {whose}{where}", unknown, timeline.mesh, rank)
