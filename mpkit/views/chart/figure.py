"""A chart as a plotly Figure, for notebooks: the same colours and words, with zoom and numbers under the pointer."""

from textwrap import wrap
from typing import Any

from mpkit.common.missing_packages import needs_notebook
from mpkit.views.chart.chart import Axis, Chart, Panel, Series
from mpkit.views.chart.frame import inks_of, told_of
from mpkit.views.theme import FONT, GREY, HEADING, LINE, TEXT, THEMES

try:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots
except ImportError as error:
    raise needs_notebook("a chart as a plotly Figure", error) from error


TITLE = 44
"""Letters of the title per line: as many as fit the narrowest column, 400 pixels."""


def chart_figure(chart: Chart) -> Any:
    """Return the chart as a plotly Figure.

    >>> figure = chart_figure(Chart("Sums", [Panel([Series("a", [1, 2]), Series("b", [3, 4])], ["x", "y"])]))
    >>> [trace.name for trace in figure.data], figure.layout.barmode
    (['a', 'b'], 'stack')
    """
    across = max(1, min(chart.across, len(chart.panels), 3))
    down = max(1, -(-len(chart.panels) // across))
    titles = [f"<b>{panel.title}</b>  {panel.note}" for panel in chart.panels]
    figure = make_subplots(
        rows=down, cols=across, subplot_titles=titles if any(panel.title for panel in chart.panels) else None,
        horizontal_spacing=0.09 if across > 1 else 0, vertical_spacing=0.3 / down if down > 1 else 0,
    )  # fmt: skip
    named: set[str] = set()
    for number, panel in enumerate(chart.panels):
        place = {"row": number // across + 1, "col": number % across + 1}
        _add(figure, panel, place, named)
        for update, axis in ((figure.update_xaxes, panel.x), (figure.update_yaxes, panel.y)):
            update(**_axis(axis, panel), **place)
        if panel.kind in ("rows", "cells"):
            figure.update_yaxes(autorange="reversed", **place)
        if panel.limit:
            words = {"annotation_text": f"{panel.limit[1]} ", "annotation_position": "top left"}
            figure.add_vline(
                x=panel.limit[0], line_dash="dash", line_color=THEMES["light"].limit, **words, **place
            )
    lines = wrap(chart.title, TITLE)
    tall = max((_height(panel, chart.tall) for panel in chart.panels), default=chart.tall) * down
    figure.update_layout(
        title={"text": "<br>".join(lines), "font": {"size": HEADING}, "x": 0, "xanchor": "left", "pad": {"l": 8}},
        height=tall + 20 * len(lines) + 120, margin={"l": 16, "r": 16, "t": 40 + 20 * len(lines), "b": 60},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", barmode="stack",
        font={"family": FONT, "color": GREY, "size": TEXT},
        hoverlabel={"font": {"color": THEMES["light"].text}, "bgcolor": THEMES["light"].ground},
        legend={"orientation": "h", "x": 0, "y": -64 / max(tall, 1), "yanchor": "top", "traceorder": "normal"},
    )  # fmt: skip
    every = {"gridcolor": LINE, "zeroline": False, "automargin": True}
    figure.update_annotations(font={"size": TEXT})
    return figure.update_xaxes(**every).update_yaxes(**every)


def _height(panel: Panel, tall: float) -> float:
    return {"rows": 34.0 * len(panel.places) + 30, "cells": max(280.0, 14.0 * len(panel.series))}.get(
        panel.kind, tall
    )


def _axis(axis: Axis, panel: Panel) -> dict[str, Any]:
    """Return an axis' title, its range, and its numbers in words."""
    found: dict[str, Any] = {"title": axis.title or None, "visible": not axis.hidden}
    if axis.log:
        found |= {"type": "log"}
    if axis.at:
        found |= {"tickvals": list(axis.at), "ticktext": [axis.unit.words(value) for value in axis.at]}
    elif axis is (panel.x if panel.kind == "rows" else panel.y) and not axis.log and panel.kind != "cells":
        values = [*panel.sums(), *(v for each in panel.series for v in each.values if v is not None)]
        levels = axis.unit.levels(max(values, default=1.0), 4) if (axis.low or 0) == 0 else []
        found |= {"tickvals": [value for value, _ in levels], "ticktext": [words for _, words in levels]}
        found |= {"rangemode": "tozero"} if panel.kind != "lines" else {}
    elif (
        panel.kind == "lines" and axis is panel.x and axis.low == 0 and not axis.log
    ):  # such as memory: GiB, not "20B"
        far = [x for each in panel.series for x in each.at] + [panel.limit[0] if panel.limit else 0.0]
        levels = axis.unit.levels(max(far, default=1.0), 5)
        found |= {"tickvals": [value for value, _ in levels], "ticktext": [words for _, words in levels]}
    return found


def _add(figure: Any, panel: Panel, place: dict[str, int], named: set[str]) -> None:
    """Add a panel's series to its place in the figure."""
    if panel.kind == "cells":
        figure.add_trace(_heatmap(panel), **place)
        return
    for series, ink in zip(panel.series, inks_of(panel), strict=True):
        if any(value for value in series.values if value is not None):
            trace = _trace(panel, series, ink if isinstance(ink, str) else ink[0])
            shown = series.key is not None and series.name not in named
            named.add(series.name)
            trace.update(name=series.key or series.name, legendgroup=series.name, showlegend=shown)
            figure.add_trace(trace, **place)


def _told(panel: Panel, series: Series) -> list[str]:
    values = enumerate(series.values)
    return ["" if value is None else told_of(series, i, value, panel.unit) for i, value in values]


def _trace(panel: Panel, series: Series, ink: str) -> Any:
    """Return a series of bars, of a line or of an area."""
    told: dict[str, Any] = {
        "customdata": _told(panel, series),
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    places: Any = list(series.at or panel.places)
    if panel.kind in ("bars", "rows"):
        places = [str(place) for place in places]
    if panel.groups and panel.kind == "bars":
        places = [[name for name, count in panel.groups for _ in range(count)], places]
    values: Any = list(series.values)
    flat = {"x": values, "y": places} if panel.kind == "rows" else {"x": places, "y": values}
    if series.look == "fill" and panel.kind in ("bars", "rows"):
        inks = [each if isinstance(each, str) else each[0] for each in series.inks] or ink
        return go.Bar(**flat, marker_color=inks, orientation="h" if panel.kind == "rows" else "v", **told)
    if series.look == "fill":
        line = {"shape": "hv", "width": 0, "color": ink}
        return go.Scatter(**flat, stackgroup="held", line=line, fillcolor=ink, **told)
    if series.look == "dots":
        return go.Scattergl(
            **flat, mode="markers", marker={"color": ink, "size": 4, "opacity": 0.4}, hoverinfo="skip"
        )
    mode, marker, line = MODES.get(series.look, "markers"), {"color": ink, "size": 9}, {"color": ink}
    if series.look == "mark":
        symbol = "line-ns" if panel.kind == "rows" else "line-ew"
        marker = {"symbol": symbol, "size": 10, "line": {"width": 3, "color": ink}}
    if series.look == "rings":
        marker |= {"symbol": "circle-open"}
    line |= {"dash": "dot"} if series.look == "dashes" else {"shape": "hv"} if series.look == "steps" else {}
    if series.labels:
        told |= {"text": list(series.labels), "textposition": "bottom right"}
        mode += "+text"
    return go.Scatter(**flat, mode=mode, marker=marker, line=line, cliponaxis=False, **told)


MODES = {"line": "lines", "joined": "lines+markers", "dashes": "lines", "steps": "lines+markers"}


def _heatmap(panel: Panel) -> Any:
    """Return the cells; plotly takes their colours by a number, so each colour has its own place in the scale."""
    inks = sorted({str(ink) for series in panel.series for ink in series.inks})
    at, last = {ink: i for i, ink in enumerate(inks)}, max(len(inks) - 1, 1)
    z, labels = [], []
    for series in panel.series:
        z.append([at[str(ink)] if v else None for v, ink in zip(series.values, series.inks, strict=True)])
        labels.append([words if v else "" for v, words in zip(series.values, series.labels, strict=False)])
    few = len(panel.places) <= 8 and any(map(any, labels))
    return go.Heatmap(
        z=z, x=[str(place) for place in panel.places], y=[each.name for each in panel.series], zmin=0, zmax=last,
        colorscale=[[i / last, ink] for i, ink in enumerate(inks * (2 if len(inks) == 1 else 1))], showscale=False,
        xgap=2, ygap=2, text=labels if few else None, texttemplate="%{text}" if few else None, hoverongaps=False,
        customdata=[_told(panel, each) for each in panel.series], hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
