"""How much a rank sends in a step, by axis and kind, beside what the formulas say (`mpkit.timeline.formulas`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpkit.common.display import data_frame, draw
from mpkit.plan.mesh import Mesh
from mpkit.timeline.formulas import FormulaInputs, formula_of
from mpkit.timeline.routing_formulas import add_routing
from mpkit.timeline.traffic import Flow, flows, unknown_payloads
from mpkit.trace import Kind

if TYPE_CHECKING:
    import pandas as pd

    from mpkit.timeline.timeline import Timeline

__all__ = ["CommVolume", "VolumeRow", "comm_volume"]


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
    """

    axis: str
    kind: str
    calls: float
    payload: float
    wire: float
    symbols: str = ""
    words: str = ""
    expected: float | None = None

    @property
    def ratio(self) -> float | None:
        """The bytes sent divided by those that the formula expects."""
        return self.wire / self.expected if self.expected else None


@dataclass(frozen=True, repr=False)
class CommVolume:
    """What a rank sends in a step; it prints as a table, and shows one in a notebook.

    Attributes:
        rows: one row per axis and kind.
        of: the rank and the step, in words.
        unknown: how many communications are left out, since the trace does not tell their bytes.
        mesh: the mesh of the ranks; None if it is not known.
    """

    rows: tuple[VolumeRow, ...]
    of: str
    unknown: int = 0
    mesh: Mesh | None = None

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per axis and kind, with the columns of `VolumeRow` and the ratio.

        Raises:
            ImportError: pandas is not installed.
        """
        columns = ["axis", "kind", "calls", "payload", "wire", "symbols", "words", "expected", "ratio"]
        return data_frame(([getattr(row, name) for name in columns] for row in self.rows), columns)

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
        formula = add_routing(formula_of(known, axis, kind), known, axis, kind)
        amounts = (
            sum(flow.calls for flow in mine) / len(ranks),
            sum(flow.payload for flow in mine) / len(ranks),
            sum(sum(flow.to.values()) for flow in mine) / len(ranks),
        )
        told = (
            ()
            if formula is None
            else (formula.symbols, formula.words, sum(map(formula.of, ranks)) / len(ranks))
        )
        rows.append(VolumeRow(axis, kind.word, *amounts, *told))
    whose = f"a rank sends, on average over {n}" if rank is None else f"rank {rank} sends"
    unknown = unknown_payloads(timeline)
    where = (f", in step {steps[-1]}" if steps else "") + (
        f", without {unknown:,} communications of unknown bytes" if unknown else ""
    )
    return CommVolume(tuple(rows), f"What {whose}{where}", unknown, timeline.mesh)
