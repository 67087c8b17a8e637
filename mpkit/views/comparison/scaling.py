"""Throughput by ranks as a plotly chart: one line per strategy, and the ideal line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.common.missing_packages import needs_notebook
from mpkit.views.theme import GREY, SERIES, dress_chart

if TYPE_CHECKING:
    from mpkit.prediction.experiments.scaling import Scaling

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise needs_notebook("the scaling chart", error) from error

__all__ = ["scaling_figure"]


def scaling_figure(scaling: Scaling) -> Any:
    """Draw the chart as a plotly Figure, with the numbers inside.

    Args:
        scaling: what to draw. Serial training is the first point of every other strategy's line.
    """
    from mpkit.prediction.experiments.scaling import strategy  # imported here since it needs torch

    rows = scaling.rows
    least = min(row.ranks for row in rows)
    base = next(row for row in rows if row.ranks == least)
    numbers = sorted({row.ranks for row in rows})
    lines: dict[str, list[Any]] = {}
    for row in rows:
        lines.setdefault(strategy(row.plan), []).append(row)
    serial = lines.pop("serial", []) if len(lines) > 1 else []
    ideal = [base.throughput * n / least for n in numbers]
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=numbers,
            y=ideal,
            mode="lines",
            name="ideal",
            line={"color": GREY, "dash": "dash"},
            hovertemplate="ideal: %{y:.4s} samples/s<extra></extra>",
        )
    )
    for (name, held), ink in zip(lines.items(), SERIES * len(lines), strict=False):
        drawn = sorted([*serial, *held], key=lambda row: row.ranks)
        figure.add_trace(_line(name, drawn, ink))
        walls = [row for row in drawn if row.wall_throughput is not None]
        if walls:
            figure.add_trace(
                go.Scatter(
                    x=[row.ranks for row in walls],
                    y=[row.wall_throughput for row in walls],
                    mode="markers",
                    name=f"{name}, by the wall clock",
                    marker={"color": ink, "symbol": "circle-open", "size": 10},
                )
            )
    dress_chart(figure, scaling.kind + (f", on {scaling.hardware}" if scaling.hardware else ""))
    figure.update_xaxes(title="ranks", type="log", tickvals=numbers)
    # The ticks are where the ideal line crosses the numbers of ranks, so that distances from it can be read off.
    marks = [f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for value in ideal]
    return figure.update_yaxes(title="samples/s", type="log", tickvals=ideal, ticktext=marks)


def _line(name: str, rows: list[Any], ink: str) -> Any:
    return go.Scatter(
        x=[row.ranks for row in rows],
        y=[row.throughput for row in rows],
        customdata=[(row.speed_up, row.efficiency) for row in rows],
        mode="lines+markers+text",
        text=[f"{row.efficiency:.0%}" for row in rows],
        textposition="bottom right",
        name=name,
        line={"color": ink},
        hovertemplate="%{x} ranks: %{y:.4s} samples/s, speed-up %{customdata[0]:.2f}, efficiency "
        "%{customdata[1]:.0%}<extra>" + name + "</extra>",
    )
