"""Stages of one rank told apart: a block of its second stage has a bar at its foot, one of its third has two."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.timeline import Timeline
from mpkit.trace import Lane

__all__ = ["bars", "chunk_of", "stages_of"]


def stages_of(timeline: Timeline) -> dict[int, list[int]]:
    """Return the stages of each rank that has several, in their order.

    >>> import mpkit as mk
    >>> stages_of(mk.simulate(mk.Plan.pipeline("zbv", 2, 2))), stages_of(mk.simulate(mk.Plan.gpipe(2, 2)))
    ({0: [0, 3], 1: [1, 2]}, {})
    """
    spans = timeline.spans
    there = np.unique(spans[(spans["lane"] == Lane.COMPUTE) & (spans["stage"] >= 0)][["rank", "stage"]])
    stages: dict[int, list[int]] = {}
    for rank, stage in there.tolist():
        stages.setdefault(rank, []).append(stage)
    return {rank: mine for rank, mine in stages.items() if len(mine) > 1}


def chunk_of(stages: dict[int, list[int]], timeline: Timeline, box: npt.NDArray[Any]) -> int:
    """Return which of its rank's stages a box of work is of: 0 for the first, or if there is only one."""
    if not stages or not box["key"] or box["span"] < 0:
        return 0
    span = timeline.spans[box["span"]]
    mine = stages.get(int(span["rank"]), [])
    return mine.index(int(span["stage"])) if int(span["stage"]) in mine else 0


def bars(chunk: int, look: str, x: float, foot: float, width: float) -> str:
    """Draw the bars of a block as SVG, in the colour of its text.

    Args:
        chunk: which of its rank's stages the block is of.
        look: the class of its text.
        x: the left of the block.
        foot: its lower edge.
        width: its width.
    """
    return "".join(
        f'<rect class="{look}" x="{x + 1.5:.2f}" y="{foot - 4 - 4 * bar:g}" width="{width - 3:.2f}" height="2"/>'
        for bar in range(min(chunk, 4))
    )
