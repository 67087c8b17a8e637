"""A chart as data: panels of series over places, and nothing about how it is drawn.

    Chart     a title, panels, a note below
    Panel     its kind, the places, the series over them, its axes
    Series    values with a name, a colour and a look
    Axis      a title and a unit; where it begins, and whether it is logarithmic
    Unit      how an amount is written, and which round amounts an axis has

A result's chart is a function of a few lines that returns one (`views/*/…_chart.py`, `renderers.py`). Kinds of panels:

    bars      a bar per place, its series stacked; places may be in groups
    rows      the same lying down
    lines     series against numbers
    areas     series against time, stacked; each value holds until the next
    cells     a cell per place and series, its colour by the value
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from mpkit.common.table import table_text
from mpkit.common.units import memory_text, percent, seconds
from mpkit.views.drawing.sheet import levels, memory_levels, ticks

Kind = Literal["bars", "rows", "lines", "areas", "cells"]
Look = Literal["fill", "line", "joined", "dashes", "steps", "points", "rings", "dots", "mark"]
Ink = str | tuple[str, str]
"""A colour on all grounds, or one on light and one on dark ones."""


@dataclass(frozen=True)
class Unit:
    """How amounts are written; `levels(highest, most)` returns at most `most` + 1 round ones up to the highest."""

    words: Callable[[float], str]
    levels: Callable[[float, int], list[tuple[float, str]]]  # amounts with their words


def _plain(words: Callable[[float], str], highest: float, most: int) -> list[tuple[float, str]]:
    return [(level, words(level)) for level in levels(highest, most)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.4g}"


def _whole(highest: float, most: int) -> list[tuple[float, str]]:
    return [(level, f"{level:,.0f}") for level in levels(highest, most) if level == int(level)]


NUMBER = Unit(_short, partial(_plain, _short))
COUNT = Unit("{:,.0f}".format, _whole)
SECONDS = Unit(seconds, ticks)
WHOLE_SHARE = Unit(lambda share: f"{100 * share:.0f} %", partial(_plain, percent))


def bytes_of_memory(like: float = 0) -> Unit:
    """Return the unit of amounts of memory, that of the largest one beside them.

    >>> bytes_of_memory(3 * 2**30).words(2**28)
    '0.25 GiB'
    """
    return Unit(partial(memory_text, like=like), partial(memory_levels, like=like))


@dataclass(frozen=True)
class Axis:
    """An axis."""

    title: str = ""
    unit: Unit = NUMBER
    low: float | None = None  # where it begins; None: with the data, and under bars at 0
    high: float | None = None
    log: bool = False
    at: Sequence[float] = ()  # the amounts that are written, if not the unit's round ones
    hidden: bool = False


@dataclass(frozen=True)
class Series:
    """Values with a name."""

    name: str
    values: Sequence[float | None]  # one per place; None: no value
    ink: Ink = ""  # "": the next of the theme's
    look: Look = "fill"  # "fill" is stacked; "mark" is a line across each place, such as a formula's value
    at: Sequence[float] = ()  # the numbers that the values are at, if not those of the panel's places
    labels: Sequence[str] = ()  # written at each value
    told: Sequence[str] = ()  # each value in words for the pointer; by default in the unit's
    inks: Sequence[Ink] = ()  # a colour for each value
    key: str | None = ""  # its words in the legend, if not its name; None: not in the legend


@dataclass(frozen=True)
class Panel:
    """Series over places."""

    series: Sequence[Series]  # in the order in which they are stacked
    places: Sequence[object] = ()  # the names of bars, rows or columns; or the numbers that lines are at
    kind: Kind = "bars"
    title: str = ""  # above it, on the left
    note: str = ""  # above it, on the right
    x: Axis = field(default_factory=Axis)  # of rows, the axis of the values
    y: Axis = field(default_factory=Axis)
    groups: Sequence[tuple[str, int]] = ()  # names of neighbouring places, each with their number
    ends: Sequence[str] = ()  # written at the end of each bar
    limit: tuple[float, str] | None = (
        None  # a line that values must not pass, such as a device's memory; its words
    )
    peak: bool = False  # whether a line marks the highest sum
    keys: bool = False  # whether its legend is below it, instead of below all panels

    @property
    def unit(self) -> Unit:
        """The unit of its values."""
        return (self.x if self.kind == "rows" else self.y).unit

    def sums(self) -> list[float]:
        """Return what is stacked at each place."""
        stacked = [each.values for each in self.series if each.look == "fill"]
        return [sum(value or 0.0 for value in column) for column in zip(*stacked, strict=True)]


@dataclass(frozen=True)
class Chart:
    """A chart."""

    title: str
    panels: Sequence[Panel]  # from left to right, line by line
    told: str = ""  # the chart in words, for readers who cannot see it
    below: str = ""  # a line below the title
    note: str = ""  # a line below the panels
    across: int = 3  # the most panels side by side
    least: float = 260.0  # the pixels that a panel needs in width
    tall: float = 200.0  # the pixels of a panel's height; rows and cells have their own
    shared: bool = True  # whether all panels have one scale
    left_out: str = ""  # what is not drawn, in words


def chart_text(chart: Chart) -> str:
    """Return the title, and a table per panel.

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
