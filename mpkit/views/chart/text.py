"""A chart as a table of words: a line per place, a column per series, for the terminal and for who cannot see it."""

from __future__ import annotations

from mpkit.common.table import table_text
from mpkit.views.chart.chart import Chart, Panel

__all__ = ["chart_text"]


def chart_text(chart: Chart) -> str:
    """Return the title, and a table per panel.

    >>> from mpkit.views.chart.chart import Series
    >>> print(chart_text(Chart("Sums", [Panel([Series("a", [1, 2]), Series("b", [3, 4])], ["x", "y"])])))
    Sums
       a  b  sum
    x  1  3    4
    y  2  4    6
    """
    return "\n".join([chart.title, *(line for panel in chart.panels for line in _table(panel))])


def _table(panel: Panel) -> list[str]:
    words = panel.unit.words
    series = [each for each in panel.series if any(each.values)]
    stacked = panel.kind in ("bars", "rows") and sum(each.look == "fill" for each in series) > 1
    groups = [name for name, count in panel.groups for _ in range(count)]
    titles = [panel.title, panel.x.title] if groups else [panel.title or panel.x.title]
    rows = [[*titles, *(each.name for each in series), *(["sum"] * stacked)]]
    for i, place in enumerate(panel.places):
        cells = ["" if each.values[i] is None else words(each.values[i] or 0.0) for each in series]
        rows.append([*groups[i : i + 1], str(place), *cells, *([words(panel.sums()[i])] * stacked)])
    return table_text(rows, (0, 1) if groups else (0,))
