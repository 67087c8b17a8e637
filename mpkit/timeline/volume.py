"""How much a rank sends in a step, by axis and kind, beside what the formulas say (`mpkit.timeline.formulas`).

Ranks also send something for routing that depends on the whole batch (`mpkit.strategies.runtime.batch_routing`):

    all-reduces   E numbers per layer and step for a bias, and for the auxiliary loss: 2 E (n-1)/n each
    all-gathers   E numbers per layer and stretch of tokens for a capacity: E (n-1)/n per stretch of a micro-batch

n ranks have different tokens of the batch: dp x cp, and tp where it divides the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpkit.common.display import data_frame, draw
from mpkit.plan.axes import join_axes
from mpkit.plan.mesh import Mesh
from mpkit.plan.mesh_of_trace import long_axes
from mpkit.timeline.formulas import Formula, FormulaInputs, formula_of
from mpkit.timeline.traffic import Flow, flows, unknown_payloads
from mpkit.trace import Kind

if TYPE_CHECKING:
    import pandas as pd

    from mpkit.timeline.timeline import Timeline

__all__ = ["CommVolume", "VolumeRow", "add_routing", "comm_volume"]


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


def add_routing(
    formula: Formula | None, known: FormulaInputs | None, axis: str, kind: Kind
) -> Formula | None:
    """Return a formula with what balanced routing adds to it along this axis; the formula itself if it adds nothing."""
    if known is None:
        return formula
    mesh, long = known.mesh, long_axes(known.mesh)
    divided = ("tp",) if known.plan.get("sequence_parallel") else ()
    if axis != join_axes(name for name in mesh.parts("dp", "cp", *divided) if name in long):
        return formula
    n = mesh.dp * mesh.cp * (mesh.tp if divided else 1)
    sent, times = {Kind.ALL_REDUCE: (known.routing[0], 2), Kind.ALL_GATHER: (known.routing[1], 1)}.get(
        kind, ((), 0)
    )
    if not any(sent):
        return formula
    symbols, words = f"{'2 ' * (times == 2)}E (n-1)/n a layer", "the rows of each expert in the whole batch"
    if formula is None:
        return Formula(symbols, words, lambda rank: times * known.total(sent, rank) * (n - 1) / n)
    return Formula(
        f"{formula.symbols}; {symbols}",
        f"{formula.words}; {words}",
        lambda rank: formula.of(rank) + times * known.total(sent, rank) * (n - 1) / n,
    )
