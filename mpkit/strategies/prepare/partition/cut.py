"""A cut of a model into stages, and what each stage would be."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BY", "Cut", "StageFound"]

BY = {
    "time": "measured seconds of forward and backward",
    "flops": "FLOPs of the forward",
    "memory": "bytes of weights, gradients, Adam's two states, and one micro-batch's activations",
}


@dataclass(frozen=True)
class StageFound:
    """A stage that a cut would create.

    Attributes:
        blocks: the names of its blocks, in order.
        cost: its cost in the unit of `Cut.by`.
        share: its share of the total cost.
        parameters: its number of parameters.
        kept: bytes that a micro-batch keeps for its backward.
    """

    blocks: list[str]
    cost: float
    share: float
    parameters: int
    kept: int


@dataclass(frozen=True)
class Cut:
    """Where to cut a model, and why. Use it as `Plan(cut=found.points, ...)`; `print` shows it.

    Attributes:
        points: the first block of each stage but stage 0, in the form of `Plan.cut`.
        by: the quantity that was balanced, a key of `BY`.
        stages: the resulting stages.
        sends: bytes per micro-batch sent forward between stages, by (source, target).
        tied: the weights that several stages would compute with, and those stages.
    """

    points: list[int | str]
    by: str
    stages: list[StageFound]
    sends: dict[tuple[int, int], int]
    tied: dict[str, list[int]]

    def __str__(self) -> str:
        rows = [("stage", "share", "parameters", "keeps", "sends to", "blocks")]
        for number, stage in enumerate(self.stages):
            sends = [f"{to}: {_bytes(n)}" for (source, to), n in self.sends.items() if source == number]
            first, last = stage.blocks[0], stage.blocks[-1]
            blocks = first if first == last else f"{first} to {last}"
            kept, share = _bytes(stage.kept), f"{stage.share:.0%}"
            rows.append((str(number), share, f"{stage.parameters:,}", kept, ", ".join(sends) or "-", blocks))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        tied = [f"tied: {name}, in stages {', '.join(map(str, at))}" for name, at in self.tied.items()]
        return "\n".join([f"balanced by {self.by} ({BY[self.by]}); cut={self.points}", *lines, *tied])


def _bytes(n: int) -> str:
    """Format a number of bytes for a table.

    >>> _bytes(1500), _bytes(40)
    ('1.5 kB', '40 B')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"
