"""How much a rank sends in a step, by axis and kind, beside what the formulas say (`mpkit.formulas`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpkit.formulas import Known, formula_of
from mpkit.shown import data_frame
from mpkit.trace import Kind
from mpkit.traffic import Flow, flows

if TYPE_CHECKING:
    import pandas as pd

    from mpkit.timeline import Timeline

__all__ = ["CommVolume", "VolumeRow", "comm_volume"]


@dataclass(frozen=True)
class VolumeRow:
    """What a rank sends in a step by one kind of communication along one axis.

    Attributes:
        axis: "tp", say, or "dp x cp" of groups that span both.
        kind: such as "all_reduce".
        calls: how many.
        payload: bytes of their tensors.
        wire: bytes that the rank sends for them.
        symbols: the formula, in elements; "" where there is none.
        words: what is sent, by the formula.
        expected: bytes on the wire by the formula; None where there is none, or not all of it is known.
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
        """What was sent, over what the formula says."""
        return self.wire / self.expected if self.expected else None


@dataclass(frozen=True, repr=False)
class CommVolume:
    """What a rank sends in a step: prints as a table, and is one in a notebook.

    Attributes:
        rows: by axis and kind.
        of: whose and when, in words.
    """

    rows: tuple[VolumeRow, ...]
    of: str

    def to_dataframe(self) -> pd.DataFrame:
        """A row an axis and kind, with the columns of `VolumeRow` and ratio.

        Raises:
            ImportError: pandas is not installed.
        """
        columns = ["axis", "kind", "calls", "payload", "wire", "symbols", "words", "expected", "ratio"]
        return data_frame(([getattr(row, name) for name in columns] for row in self.rows), columns)

    def __str__(self) -> str:
        from mpkit.views.volume import volume_text

        return volume_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from mpkit.views.volume import volume_html

        return volume_html(self)


def comm_volume(timeline: Timeline, rank: int | None = None) -> CommVolume:
    """The volume of a timeline's last complete step; see `Timeline.comm_volume`."""
    n, steps = timeline.world_size, timeline.steps
    if rank is not None and rank not in range(n):
        raise ValueError(
            f"comm_volume(rank={rank!r}): this timeline has ranks 0 to {n - 1}; None for their average"
        )
    ranks = range(n) if rank is None else [rank]
    known = Known.of(timeline.meta, n)
    groups: dict[tuple[str, Kind], list[Flow]] = {}
    for flow in flows(timeline):
        if flow.rank in ranks and flow.payload:
            groups.setdefault((flow.axis, flow.kind), []).append(flow)
    rows = []
    for (axis, kind), mine in groups.items():
        found = formula_of(known, axis, kind)
        amounts = (
            sum(flow.calls for flow in mine) / len(ranks),
            sum(flow.payload for flow in mine) / len(ranks),
            sum(sum(flow.to.values()) for flow in mine) / len(ranks),
        )
        told = () if found is None else (found.symbols, found.words, sum(map(found.of, ranks)) / len(ranks))
        rows.append(VolumeRow(axis, kind.word, *amounts, *told))
    whose = f"a rank sends, on average over {n}" if rank is None else f"rank {rank} sends"
    return CommVolume(tuple(rows), f"What {whose}" + (f", in step {steps[-1]}" if steps else ""))
