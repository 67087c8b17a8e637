"""Memory by strategy as a plotly chart: a stacked bar per rank, and the formula as a mark across it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.common.missing_packages import needs_notebook
from mpkit.common.units import memory_text, memory_unit
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
    x = [[row.strategy for row in rows], [str(row.rank) for row in rows]]
    most = max((sum(row.held.values()) for row in rows), default=0)
    factor, unit = memory_unit(most)
    figure = go.Figure()
    for category in CATEGORIES:
        figure.add_trace(
            go.Bar(
                x=x,
                y=[row.held[category] / factor for row in rows],
                name=category,
                marker_color=CATEGORY_INKS[category][0],
                customdata=[memory_text(row.held[category], most) for row in rows],
                hovertemplate="%{x}: %{customdata}<extra>" + category + "</extra>",
            )
        )
    figure.add_trace(
        go.Scatter(
            x=x,
            y=[sum(row.formula.values()) / factor for row in rows],
            mode="markers",
            name="params + grads + optimizer by the formula",
            marker={"symbol": "line-ew", "size": 10, "line": {"width": 3, "color": ALARM}},
            customdata=[" + ".join(memory_text(part, most) for part in row.formula.values()) for row in rows],
            hovertemplate=f"formula: %{{y:.4g}} {unit} = %{{customdata}}<extra></extra>",
        )
    )
    title = f"Memory by strategy, {memory.how}" + (f"; {left_out} more ranks not shown" if left_out else "")
    dress_chart(figure, title, 420, below=84, barmode="stack", bargap=0.2)
    figure.update_xaxes(title="rank, by strategy", tickangle=0)
    return figure.update_yaxes(title=unit, rangemode="tozero")
