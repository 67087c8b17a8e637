"""A chart as a standalone SVG document: for pages, README, stored notebooks and paper.

chart_svg   the sheet: panels line by line, the legend, the notes
_bars ...   what stands in a panel, by its kind; `frame.py` has the axes
"""

import math
from collections.abc import Callable, Iterable, Sequence

from mpkit.common.safe_text import escape
from mpkit.views.chart.chart import Chart, Ink, Panel, Series
from mpkit.views.chart.frame import (
    END,
    LETTER,
    MIDDLE,
    SMALL,
    Inks,
    Room,
    Scale,
    across_axis,
    inks_of,
    inside,
    rect,
    rule,
    scale_of,
    told_of,
    upright_axis,
    words_at,
)  # fmt: skip
from mpkit.views.drawing.colours import legible_on
from mpkit.views.drawing.sheet import keys, sheet
from mpkit.views.theme import MARGIN, wrap_words

GAP, HEAD, APART = 26.0, 22.0, 14.0
"""Pixels: between panels, for the title above one, between lines of panels."""
BAR, ROW, CELL = 64.0, 26.0, 44.0
"""Pixels: the widest bar, the height of a row, the largest cell."""
MOST_POINTS = 300
Drawn = tuple[list[str], float]
"""Elements, and the y below them."""


def chart_svg(chart: Chart, width: int = 960) -> str:
    """Draw a chart as a standalone SVG document.

    >>> drawn = chart_svg(Chart("Sums", [Panel([Series("a", [1, 2]), Series("b", [3, 4])], ["x", "y"])]))
    >>> drawn.count("<rect class=")  # the ground, four bars, two keys
    7
    """
    inks, space = Inks(), width - 2 * MARGIN
    across = max(1, min(chart.across, len(chart.panels), int(space / chart.least)))
    each = (space - (across - 1) * GAP) / across
    y = MARGIN + 28 * bool(chart.title) + 24 * bool(chart.below)
    highest = max((_highest(panel) for panel in chart.panels), default=0.0) if chart.shared else 0.0
    body: list[str] = []
    for first in range(0, len(chart.panels), across):
        bottom = y
        for at, panel in enumerate(chart.panels[first : first + across]):
            room = Room(MARGIN + at * (each + GAP), y, each, chart.tall, highest or _highest(panel))
            parts, end = _panel(panel, room, inks)
            label = escape(panel.title or chart.title, quote=True)
            body.append(f'<g aria-label="{label}">{"".join(parts)}</g>')
            bottom = max(bottom, end)
        y = bottom + APART
    common = [panel for panel in chart.panels if not panel.keys]
    legend = keys(_legend(common, inks), y - 2, width, chart.left_out)
    y = legend.y + 22 if legend.parts else y - 6
    name = chart.title or chart.told.partition(".")[0]
    return sheet(
        "chart", name, chart.told or name, [*body, *legend.parts], width, y, head=chart.title,
        below=chart.below, foot=chart.note, classes=inks.classes,
    )  # fmt: skip


def _legend(panels: Iterable[Panel], inks: Inks) -> list[tuple[str, str]]:
    """Return the looks and words of what occurs in the panels; that of a line is a thin square."""
    found: dict[str, str] = {}
    for panel in panels:
        for series, ink in zip(panel.series, inks_of(panel), strict=True):
            words = series.name if series.key == "" else series.key
            if words and panel.kind != "cells" and (series.look != "fill" or any(series.values)):
                thin = series.look in ("mark", "line", "joined", "dashes", "steps")
                found.setdefault(words, inks(ink) + ' data-thin=""' * thin)
    return [(look, words) for words, look in found.items()]


def _highest(panel: Panel) -> float:
    values = [
        value for each in panel.series for value in each.values if value is not None and math.isfinite(value)
    ]
    return max([*values, *panel.sums(), panel.limit[0] if panel.limit else 0.0], default=0.0)


def _panel(panel: Panel, room: Room, inks: Inks) -> Drawn:
    """Draw a panel with its title, and its legend if it has its own."""
    parts, y = list[str](), room.y
    if panel.title or panel.note:
        lines = wrap_words(panel.title, room.wide, bold=True)
        title = lines[0] + " …" * (len(lines) > 1) if lines else ""
        parts.append(words_at(room.x, y + 12, title, "words", ' font-weight="600"'))
        used = 7.6 * len(title) + 12
        if used + LETTER * len(panel.note) > room.wide:
            y, used = y + 18, 0.0
        if panel.kind == "cells":
            parts.append(words_at(room.x + used, y + 12, panel.note))
        else:
            parts.append(words_at(room.right, y + 12, panel.note, "faint", ' text-anchor="end"'))
        y += HEAD
    draw = {"bars": _bars, "rows": _rows, "lines": _lines, "areas": _areas, "cells": _cells}[panel.kind]
    drawn, y = draw(panel, room._replace(y=y), inks)
    legend = keys(_legend([panel], inks) if panel.keys else [], y + 4, room.right + MARGIN, left=room.x)
    return [*parts, *drawn, *legend.parts], legend.y + 20 if legend.parts else y


Place = Callable[[int, float, float], tuple[float, float, float, float]]
"""Returns x, y, width and height of a part of a bar, by the bar's number, from an amount to another."""


def _stack(panel: Panel, inks: Inks, place: Place) -> list[str]:
    """Draw stacked bars, with the words that fit into them."""
    parts, under = list[str](), [0.0] * len(panel.places)
    for series, ink in zip(panel.series, inks_of(panel), strict=True):
        for i, value in enumerate(series.values if series.look == "fill" else ()):
            if value:
                mine: Ink = series.inks[i] if series.inks else ink
                x, y, wide, tall = place(i, under[i], under[i] + value)
                under[i] += value
                parts.append(rect(inks(mine), x, y, wide, tall, told_of(series, i, value, panel.unit)))
                words = series.labels[i] if series.labels else ""
                if words and wide > 6 * len(words) + 4 and tall >= 11:
                    parts.append(inside(inks(mine, "t"), x + wide / 2, y + tall / 2 + 4, words))
    return parts


def _marks(panel: Panel) -> Iterable[tuple[Series, Ink, int, float]]:
    """Yield each mark: its series and colour, the number of its place, its value."""
    for series, ink in zip(panel.series, inks_of(panel), strict=True):
        for i, value in enumerate(series.values if series.look == "mark" else ()):
            if value is not None:
                yield series, ink, i, value


def _bars(panel: Panel, room: Room, inks: Inks) -> Drawn:
    parts, scale, left = upright_axis(panel, [room.highest], room, zero=True)
    groups = panel.groups or [("", len(panel.places))]
    gap = 20.0 if panel.groups else 0.0
    step = min((room.right - left - gap * (len(groups) - 1)) / max(len(panel.places), 1), BAR)
    starts, heads, at = list[float](), list[tuple[list[str], float]](), left
    for name, count in groups:
        heads.append((wrap_words(name, step * count + gap - 4), at + step * count / 2))
        starts += [at + step * i for i in range(count)]
        at += step * count + gap
    pad = min(3.0, step / 8)
    parts += _stack(
        panel,
        inks,
        lambda i, low, high: (starts[i] + pad, scale(high), step - 2 * pad, scale(low) - scale(high)),
    )
    for series, ink, i, value in _marks(panel):
        told, y = told_of(series, i, value, panel.unit), scale(value)
        parts.append(rule(inks(ink, "s"), (starts[i], starts[i] + step), (y, y), told))
    longest = max((LETTER * len(str(place)) for place in panel.places), default=0.0)
    every = max(1, math.ceil((longest + 4) / step))
    for start, place in [*zip(starts, panel.places, strict=True)][::every]:
        parts.append(words_at(start + step / 2, scale.start + 15, str(place), "faint", MIDDLE))
    y = scale.start + 20
    for lines, middle in heads:
        for i, line in enumerate(lines):
            parts.append(words_at(middle, y + 14 + 14 * i, line, "words", ' text-anchor="middle"'))
    y += 14 * max(len(lines) for lines, _ in heads) + 6 * bool(panel.groups)
    if panel.x.title:
        parts.append(words_at((left + at - gap) / 2, y + 12, panel.x.title, "faint", MIDDLE))
        y += 18
    return parts, y


def _rows(panel: Panel, room: Room, inks: Inks) -> Drawn:
    names = [str(place) for place in panel.places]
    longest = 7.0 * max(map(len, names), default=0)
    gutter = min(longest + 10, room.wide * 0.42) if longest else 0.0
    ending = min(max((LETTER * len(words) + 14 for words in panel.ends), default=0.0), room.wide * 0.45)
    scale = scale_of(panel.x, [_highest(panel)], room.x + gutter, room.right - ending, zero=True)
    size, small = (11, SMALL) if longest > gutter else (12, "")
    lines = [wrap_words(name, gutter - 6, size) if name else [] for name in names]
    ends = {sum(count for _, count in panel.groups[: i + 1]) for i in range(len(panel.groups))}
    parts, tops, thick, top = list[str](), list[float](), ROW - 8, room.y
    for i, mine in enumerate(lines):
        top += 8 if i in ends else 0
        tall = max(ROW, 12.0 * len(mine) + 6)
        tops.append(top + (tall - ROW) / 2)
        for number, line in enumerate(mine):
            y = tops[i] + 13 + 12 * (number - (len(mine) - 1) / 2)
            parts.append(words_at(scale.start - 8, y, line, "words", f'{small} text-anchor="end"'))
        top += tall
    bottom = top
    parts += _stack(
        panel, inks, lambda i, low, high: (scale(low), tops[i], scale(high) - scale(low) - 0.6, thick)
    )
    for series, ink, i, value in _marks(panel):
        look, x = f'{inks(ink, "s")} stroke-dasharray="4 3"', scale(value)
        parts.append(
            rule(look, (x, x), (tops[i] - 3, tops[i] + ROW - 5), told_of(series, i, value, panel.unit))
        )
    over, words = panel.limit or (math.inf, "")
    for i, (end, total) in enumerate(zip(panel.ends, panel.sums(), strict=False)):
        x = scale(max(total, over) if panel.limit else total) + 8
        parts.append(words_at(x, tops[i] + 13, end, "over" if total > over else "words", SMALL))
    if panel.limit:
        parts.append(rule('class="limit"', (scale(over), scale(over)), (room.y - 5, bottom + 2), words))
    axis, y = across_axis(panel.x, scale, bottom, room.right)
    return parts + axis, y


Point = tuple[float, float, int]
"""x and y, and the number of the value."""


def _points(panel: Panel, series: Series) -> list[Point]:
    """Return the values that are there, at most `MOST_POINTS` of a line."""
    points = [
        (float(str(x)), value, i)
        for i, (x, value) in enumerate(zip(series.at or panel.places, series.values, strict=True))
        if value is not None and math.isfinite(value)
    ]
    thin = max(1, len(points) // MOST_POINTS) if series.look != "dots" else 1
    return points if thin == 1 else points[::thin] + points[-1:]


def _lines(panel: Panel, room: Room, inks: Inks) -> Drawn:
    points = [_points(panel, series) for series in panel.series]
    heights = [value for mine in points for _, value, _ in mine]
    parts, up, left = upright_axis(panel, heights, room, zero=False)
    along = [at for mine in points for at, _, _ in mine] + ([panel.limit[0]] if panel.limit else [])
    across = scale_of(panel.x, along, left + 6, room.right - 12, zero=False)
    axis, bottom = across_axis(panel.x, across, up.start, room.right)
    parts += axis
    for series, ink, mine in zip(panel.series, inks_of(panel), points, strict=True):
        parts += _line(series, mine, across, up, ink, inks)
        for at, value, i in mine if series.look in DOTS else ():
            told = told_of(series, i, value, panel.unit) if series.look != "dots" else ""
            parts.append(
                _dot(inks(ink, "s" if series.look == "rings" else "i"), across(at), up(value), series, told)
            )
        for at, value, i in mine if series.labels else ():
            x = min(across(at) + 7, room.right - LETTER * len(series.labels[i]))
            parts.append(words_at(x, up(value) + 14, series.labels[i], "faint", SMALL))
    if panel.limit:
        x = across(panel.limit[0])
        parts.append(rule('class="limit" stroke-dasharray="5 4"', (x, x), (up.end, up.start)))
        parts.append(words_at(x - 6, up.end + 10, panel.limit[1], "faint", END))
    return parts, bottom


DOTS = {"points": 6.0, "rings": 5.0, "dots": 1.6, "joined": 2.6, "steps": 3.0}
"""The radius of a point, of the looks that have them."""


def _dot(look: str, x: float, y: float, series: Series, told: str) -> str:
    dot = f'<circle {look} cx="{x:.1f}" cy="{y:.1f}" r="{DOTS[series.look]:g}"'
    return f"{dot}><title>{escape(told)}</title></circle>" if told else f"{dot}/>"


def _line(
    series: Series, points: Sequence[Point], across: Scale, up: Scale, ink: Ink, inks: Inks
) -> list[str]:
    """Draw the line of a series, if it has one."""
    places = [f"{across(at):.1f},{up(value):.1f}" for at, value, _ in points]
    if series.look in ("line", "joined", "dashes"):
        dashes = ' stroke-dasharray="5 4"' * (series.look == "dashes")
        return [f'<polyline {inks(ink, "s")}{dashes} points="{" ".join(places)}"/>']
    if series.look == "steps" and points:
        path = "".join(f"H{across(at):.1f}V{up(value):.1f}" for at, value, _ in points[1:])
        return [f'<path {inks(ink, "s")} d="M{places[0].replace(",", " ")}{path}"/>']
    return []


def _areas(panel: Panel, room: Room, inks: Inks) -> Drawn:
    parts, up, left = upright_axis(panel, [room.highest], room, zero=True)
    times = [float(str(place)) for place in panel.places]
    across = scale_of(panel.x, times, left, room.right, zero=True)
    along, under = [across(time) for time in times], [0.0] * len(times)
    for series, ink in zip(panel.series, inks_of(panel), strict=True):
        above = [low + (value or 0.0) for low, value in zip(under, series.values, strict=True)]
        if any(series.values):
            there = _holding(along, [up(value) for value in above])
            back = _holding(along, [up(value) for value in under])[::-1]
            parts.append(
                f'<path {inks(ink)} d="M{" ".join(f"{x:.1f} {y:.1f}" for x, y in [*there, *back])}Z"/>'
            )
        under = above
    if panel.peak and any(under):
        at = max(range(len(under)), key=under.__getitem__)
        x, y = along[at], up(under[at])
        parts.append(rule('class="peak" stroke-dasharray="2 2"', (left, room.right), (y, y)))
        parts.append(f'<circle class="words" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
    axis, bottom = across_axis(panel.x, across, up.start, room.right)
    return parts + axis, bottom


def _holding(along: list[float], up: list[float]) -> list[tuple[float, float]]:
    """Return the corners of a line in which each value holds until the next."""
    corners = [(along[0], up[0])]
    for i in range(1, len(along)):
        if up[i] != up[i - 1] or i == len(along) - 1:
            corners += [(along[i], up[i - 1]), (along[i], up[i])]
    return corners


def _cells(panel: Panel, room: Room, inks: Inks) -> Drawn:
    rows, columns = max(len(panel.series), 1), max(len(panel.places), 1)
    gutter = LETTER * max((len(series.name) for series in panel.series), default=0) + 10
    wide = min((room.wide - gutter) / columns, CELL)
    tall = wide if rows == columns else min(CELL, max(room.tall / rows, 3.0))
    left, top = room.x + gutter, room.y + 16
    size = f'width="{wide * columns:.1f}" height="{tall * rows:.1f}"'
    parts = [f'<rect class="bare" x="{left:.1f}" y="{top:.1f}" {size} rx="3"/>']
    every = max(1, math.ceil((LETTER * len(str(columns)) + 6) / wide))
    for i, place in [*enumerate(panel.places)][::every]:
        parts.append(words_at(left + wide * (i + 0.5), top - 5, str(place), "faint", MIDDLE))
    gap = 1.5 if min(wide, tall) > 12 else 0.4
    for row, series in enumerate(panel.series):
        y = top + tall * row
        if row % max(1, math.ceil(13 / tall)) == 0:
            parts.append(words_at(left - 6, y + tall / 2 + 4, series.name, "faint", END))
        for i, value in enumerate(series.values):
            if value:
                x, ink, told = left + wide * i, str(series.inks[i]), told_of(series, i, value, panel.unit)
                parts.append(rect(f'fill="{ink}"', x + gap / 2, y + gap / 2, wide - gap, tall - gap, told))
                words = series.labels[i] if series.labels else ""
                if words and wide > 6 * len(words) + 2 and tall >= 14:
                    parts.append(inside(f'fill="{legible_on(ink)}"', x + wide / 2, y + tall / 2 + 3.5, words))
    return parts, top + tall * rows + 4
