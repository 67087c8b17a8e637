"""Advice as a plotly chart: step time against memory, every plan that fits, the frontier marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.support.needs import needs_notebook
from mpkit.views.drawing.chart_look import GREY, LINE, LOOK

if TYPE_CHECKING:
    from mpkit.advice.advice import Advice

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise needs_notebook("the chart of an advice", error) from error

__all__ = ["advice_figure"]

GIB = 2**30
MOST = 2000
"""Points that are drawn: the fastest, beside the frontier."""


def advice_figure(advice: Advice) -> Any:
    """Draw the chart as a plotly Figure.

    Args:
        advice: what to draw. No plan that was found is both faster and smaller than one on the frontier; hovering over
            a point shows the plan.
    """
    figure = go.Figure()
    shown = advice.found[:MOST]
    figure.add_trace(
        go.Scattergl(
            x=[each.memory / GIB for each in shown],
            y=[each.seconds for each in shown],
            mode="markers",
            name=f"the {len(shown):,} fastest of {len(advice.found):,} plans that fit",
            marker={"color": GREY, "size": 4, "opacity": 0.4},
            hoverinfo="skip",
        )
    )
    frontier = advice.frontier
    guesses = [advice.estimate(plan) for plan in frontier]
    figure.add_trace(
        go.Scatter(
            x=[advice.held(guess) / GIB for guess in guesses],
            y=[guess.step_time for guess in guesses],
            text=[repr(plan) for plan in frontier],
            mode="lines+markers",
            name="the frontier: none found is faster and smaller",
            line={"color": "#0072b2", "shape": "hv"},
            hovertemplate="%{text}<br>%{y:.3s}s per step, %{x:.1f} GiB<extra></extra>",
        )
    )
    room = advice.priced.hardware.device.memory / GIB
    figure.add_vline(x=room, line_dash="dash", line_color="#d55e00", annotation_text=f"{room:.0f} GiB")
    figure.update_layout(
        title={"text": str(advice).split(":")[0]},
        height=420,
        margin={"l": 64, "r": 16, "t": 48, "b": 48},
        **LOOK,
        legend={"x": 0.92, "y": 0.98, "xanchor": "right"},
    )
    figure.update_xaxes(title="GiB on the fullest rank", gridcolor=LINE, zeroline=False)
    figure.update_yaxes(title="seconds per step", type="log", gridcolor=LINE, zeroline=False)
    return figure
