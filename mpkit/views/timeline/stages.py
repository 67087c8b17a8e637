"""Stages in pictures: the layers that each of them computes, and how those of one rank are told apart.

A block of a rank's second stage has a bar at its foot, one of its third has two.
"""

from typing import Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.strategies.placement.placement import brief
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind, Lane


def layers_of_stages(timeline: Timeline) -> list[list[str]]:
    """Return the names of the layers that an action of each stage computes; [] if nobody knows them.

    A run notes them once, so that recording an action costs nothing more.
    """
    stages = timeline.meta.get("stages", [])
    known = all(isinstance(each, list | tuple) and all(isinstance(n, str) for n in each) for each in stages)
    return [list(names) for names in stages] if known else []


def layers_of_span(layers: list[str], span: Any) -> str:
    """Return the layers of an action of the compute lane, in words; "" for other spans."""
    stage = int(span["stage"])
    acts = span["lane"] == Lane.COMPUTE and span["kind"] != Kind.WAIT and not span["depth"]
    return layers[stage] if acts and 0 <= stage < len(layers) else ""


def layer_words(timeline: Timeline) -> list[str]:
    """Return the layers of each stage in words."""
    return [brief(names) for names in layers_of_stages(timeline)]


def layers_trait(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the layers of each stage as the browser takes them: their names to search, and their words to read.

    [] if each layer has been recorded as a span of its own: then a search finds the layers, and not whole stages.
    """
    stages, spans = layers_of_stages(timeline), timeline.spans
    recorded = {timeline.names[name] for name in np.unique(spans["name"][spans["depth"] > 0]).tolist()}
    if recorded.intersection(name for names in stages for name in names):
        return []
    return [{"names": names, "words": brief(names)} for names in stages]


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


def chunk_of(stages: dict[int, list[int]], timeline: Timeline, box: Array) -> int:
    """Return which of its rank's stages a box of work is of: 0 for the first, or if there is only one."""
    if not stages or not box["key"] or box["span"] < 0:
        return 0
    span = timeline.spans[box["span"]]
    mine = stages.get(int(span["rank"]), [])
    return mine.index(int(span["stage"])) if int(span["stage"]) in mine else 0


def bars(chunk: int, look: str, x: float, foot: float, width: float) -> str:
    """Draw the bars of a block as SVG, in the colour of its text."""
    return "".join(
        f'<rect class="{look}" x="{x + 1.5:.2f}" y="{foot - 4 - 4 * bar:g}" width="{width - 3:.2f}" height="2"/>'
        for bar in range(min(chunk, 4))
    )
