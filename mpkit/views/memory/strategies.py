"""Memory by strategy as a plotly chart: a stacked bar per rank, and the formula as a mark across it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.common.missing_packages import needs_notebook
from mpkit.trace import CATEGORIES
from mpkit.views.memory.strategies_svg import shown_of
from mpkit.views.theme import ALARM, dress_chart

if TYPE_CHECKING:
    from mpkit.prediction.experiments.memory_by_strategy import MemoryByStrategy

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise needs_notebook("the chart of memory by strategy", error) from error

from mpkit.views.drawing.colours import CATEGORY_INKS

__all__ = ["strategies_figure"]


def strategies_figure(memory: MemoryByStrategy) -> Any:
    """Draw the chart as a plotly Figure, with the numbers inside.

    Args:
        memory: what to draw; if there are many ranks, only the first are drawn.
    """
    rows, left_out = shown_of(memory)
    x = [[row.strategy for row in rows], [f"rank {row.rank}" for row in rows]]
    figure = go.Figure()
    for category in CATEGORIES:
        figure.add_trace(
            go.Bar(
                x=x,
                y=[row.held[category] for row in rows],
                name=category,
                marker_color=CATEGORY_INKS[category][0],
                hovertemplate="%{x}: %{y:.4s}B<extra>" + category + "</extra>",
            )
        )
    figure.add_trace(
        go.Scatter(
            x=x,
            y=[sum(row.formula.values()) for row in rows],
            mode="markers",
            name="params + grads + optimizer by the formula",
            marker={"symbol": "line-ew", "size": 26, "line": {"width": 3, "color": ALARM}},
            customdata=[tuple(row.formula.values()) for row in rows],
            hovertemplate="formula: %{y:.4s}B = %{customdata[0]:.4s} + %{customdata[1]:.4s} + "
            "%{customdata[2]:.4s}<extra></extra>",
        )
    )
    title = f"Memory by strategy, {memory.how}" + (f"; {left_out} more ranks not shown" if left_out else "")
    dress_chart(figure, title, 400, below=64, barmode="stack", bargap=0.2)
    return figure.update_yaxes(tickformat="~s", ticksuffix="B", rangemode="tozero")
