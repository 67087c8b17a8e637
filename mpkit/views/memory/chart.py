"""Memory by category and GPU as a plotly chart: small panels on one scale, the peak of each marked.

Beyond PANELS GPUs, one panel each would be too many: then each GPU gets a bar, at the moment when it held most. A
trace has at most 500 moments, in float32 (int64 values would be sent as JSON).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpkit.common.missing_packages import needs_notebook
from mpkit.common.units import memory_unit
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES
from mpkit.views.drawing.lanes import short_label
from mpkit.views.memory.series import RankMemory, held_text, memory_of
from mpkit.views.theme import GREY, LINE, dress_chart

try:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots
except ImportError as error:
    raise needs_notebook("the memory chart", error) from error

from mpkit.views.drawing.colours import CATEGORY_INKS

__all__ = ["memory_figure"]

PANELS, ACROSS = 16, 2
"""The most GPUs with a panel each, and the most panels side by side."""


def memory_figure(timeline: Timeline) -> Any:
    """Draw the chart as a plotly Figure, with the numbers inside.

    Args:
        timeline: the timeline whose `held` to draw.
    """
    ranks = timeline.world_size
    return _bars(ranks, timeline) if ranks > PANELS else _panels(ranks, timeline)


def _panels(ranks: int, timeline: Timeline) -> Any:
    """Draw a panel per GPU: categories stacked over time, a mark and a number at the peak."""
    across = min(ACROSS, ranks)
    down = -(-ranks // across)
    memories = [memory_of(timeline, rank, points=500) for rank in range(ranks)]
    factor, unit = _unit_of(timeline, memories)
    most = max(memory.total for memory in memories)
    used = [
        (number, category)
        for number, category in enumerate(CATEGORIES)
        if any(memory.levels[:, number].any() for memory in memories)
    ]
    figure = make_subplots(
        rows=down,
        cols=across,
        shared_yaxes="all",
        shared_xaxes="all",
        subplot_titles=[
            f"{short_label(timeline, rank)}: <b>peak {held_text(timeline, memory.total, most)}</b>"
            for rank, memory in enumerate(memories)
        ],
        horizontal_spacing=0.045,  # room for the last number of one panel and the first of the next
        vertical_spacing=0.36 / down,
    )
    for rank, memory in enumerate(memories):
        place = {"row": rank // across + 1, "col": rank % across + 1}
        for number, category in used:
            ink = CATEGORY_INKS[category][0]
            area = go.Scatter(
                x=memory.times.astype(np.float32),
                y=(memory.levels[:, number] / factor).astype(np.float32),
                name=category,
                legendgroup=category,
                showlegend=rank == 0,
                stackgroup="held",
                line={"shape": "hv", "width": 0, "color": ink},
                fillcolor=ink,
                hovertemplate=f"%{{y:.3g}} {unit}<extra>{category}</extra>",
            )
            figure.add_trace(area, **place)
        peak = go.Scatter(
            x=memory.times[memory.peak : memory.peak + 1].astype(np.float32),
            y=np.array([memory.total / factor], np.float32),
            mode="markers",
            marker={"color": GREY, "size": 8, "symbol": "diamond"},
            showlegend=False,
            cliponaxis=False,
            hovertemplate=f"peak: %{{y:.3g}} {unit} at %{{x:.3s}}s<extra></extra>",
        )
        figure.add_trace(peak, **place)
    figure.update_annotations(font={"size": 12}, yshift=4)
    return _dress_chart(figure, 90 + 130 * down, unit)


def _bars(ranks: int, timeline: Timeline) -> Any:
    """Draw a bar per GPU, with what it held when it held most."""
    memories = [memory_of(timeline, rank, points=500) for rank in range(ranks)]
    factor, unit = _unit_of(timeline, memories)
    labels = [short_label(timeline, rank) for rank in range(ranks)]
    figure = go.Figure()
    for number, category in enumerate(CATEGORIES):
        held = np.array([memory.levels[memory.peak, number] / factor for memory in memories], np.float32)
        figure.add_trace(go.Bar(x=labels, y=held, name=category, marker_color=CATEGORY_INKS[category][0]))
    figure.update_layout(barmode="stack", bargap=0.15)
    return _dress_chart(figure, 280, unit)


def _unit_of(timeline: Timeline, memories: list[RankMemory]) -> tuple[int, str]:
    """Return the bytes of the unit of all panels, and its name; a simulation counts micro-batches."""
    if timeline.clock == "simulated":
        return 1, "micro-batches"
    return memory_unit(max(memory.total for memory in memories))


def _dress_chart(figure: Any, height: int, unit: str) -> Any:
    """Give the chart the same plain look as the other pictures, on any background."""
    dress_chart(figure, height=height, left=56, above=34, below=56, hovermode="x unified")
    figure.update_xaxes(
        showgrid=False, linecolor=LINE, tickformat="~s", ticksuffix="s", nticks=4, tickangle=0
    )
    figure.update_yaxes(rangemode="tozero", nticks=4)
    figure.layout.yaxis.title = unit  # of the first panel, for all
    if figure.layout.barmode == "stack":
        figure.update_xaxes(tickformat=None, ticksuffix=None, nticks=None, tickangle=None)
    return figure
