"""The chart of a table: as text, its columns; as plotly Figure, lines, bars or points."""

from __future__ import annotations

from itertools import cycle
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

from mpkit.common.missing_packages import needs_notebook
from mpkit.views.theme import GREY, SERIES, dress_chart

if TYPE_CHECKING:
    from mpkit.prediction.chart import Chart

__all__ = ["chart_figure", "chart_text"]

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "star")
"""Series differ in their symbols too, for readers who do not see colours apart."""


def chart_text(chart: Chart) -> str:
    """Return the title, and a line per row with the columns that are drawn."""
    columns = list(dict.fromkeys(filter(None, (chart.by, chart.x, chart.label, chart.y))))
    cells = [columns, *([_word(row[column]) for column in columns] for row in chart.rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells
    ]
    marks = [f"marked at {_word(at)}: {words}" for words, at in chart.marks.items()]
    return "\n".join([*filter(None, [chart.title]), *lines, *marks])


def chart_figure(chart: Chart, height: int = 360) -> Any:
    """Draw the chart as a plotly Figure.

    Args:
        chart: what to draw.
        height: in pixels.

    Raises:
        ImportError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise needs_notebook("a chart", error) from error

    figure = go.Figure()
    for (name, rows), ink, symbol in zip(chart.series().items(), cycle(SERIES), cycle(SYMBOLS), strict=False):
        at = {"x": [row[chart.x] for row in rows], "y": [row[chart.y] for row in rows], "name": name}
        words = [str(row[chart.label]) for row in rows] if chart.label else None
        if chart.kind == "bars":
            at["x"] = [str(value) for value in at["x"]]  # categories, at equal distances
            figure.add_trace(go.Bar(**at, text=words, marker_color=ink))
            continue
        mode = "lines+markers" if chart.kind == "lines" else "markers"
        look = {"color": ink, "symbol": symbol, "size": 9, "line": {"color": GREY, "width": 1}}
        points = go.Scatter(
            **at, mode=mode + ("+text" if words else ""), text=words, marker=look, cliponaxis=False
        )
        figure.add_trace(points.update(textposition="middle right", line={"color": ink}))
    for told, x in chart.marks.items():
        figure.add_vline(x=x, line={"color": GREY, "dash": "dot", "width": 1})
        figure.add_annotation(
            x=log10(x) if "x" in chart.log else x, y=1, yref="paper", yanchor="bottom", showarrow=False,
            text=told.replace(", ", "<br>"), font={"size": 11},
        )  # fmt: skip
    above = 48 if any("," in words for words in chart.marks) else 24 if chart.marks else 0
    dress_chart(figure, chart.title, height, above=above, showlegend=chart.by is not None, barmode="group")
    figure.update_layout(legend_title_text=chart.by or "")
    for axis, update, title in (("x", figure.update_xaxes, chart.x), ("y", figure.update_yaxes, chart.y)):
        update(title=title)
        if axis in chart.log:
            marks = _decades([float(row[title]) for row in chart.rows])
            update(type="log", tickvals=marks, ticktext=[f"{mark:,g}" for mark in marks])
    if "y" not in chart.log:
        figure.update_yaxes(rangemode="tozero")
    return figure


def _decades(values: list[float]) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten around the values.

    >>> _decades([3.0, 40.0])
    [2.0, 5.0, 10.0, 20.0, 50.0]
    """
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    marks = [factor * 10.0**power for power in range(low, high + 1) for factor in (1, 2, 5)]
    first = max(i for i, mark in enumerate(marks) if mark <= min(values))
    last = min(i for i, mark in enumerate(marks) if mark >= max(values))
    return marks[first : last + 1]


def _word(value: Any) -> str:
    """Format a value; of a number, three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
