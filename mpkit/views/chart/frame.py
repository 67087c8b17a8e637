"""The frame of a panel: scales from amounts to pixels, axes with round numbers, colours as classes, words."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mpkit.common.safe_text import escape
from mpkit.views.chart.chart import Axis, Ink, Panel, Series, Unit
from mpkit.views.drawing.colours import legible_on
from mpkit.views.drawing.sheet import levels
from mpkit.views.theme import SERIES, THEMES

LETTER, TICKS, TITLE = 6.6, 20.0, 18.0
"""Pixels: of a letter, for the numbers and for the title of an axis."""

SMALL = ' font-size="11"'
MIDDLE, END = f'{SMALL} text-anchor="middle"', f'{SMALL} text-anchor="end"'


class Room(NamedTuple):
    """Where a panel is drawn, in pixels; `highest` is what its scale reaches at least."""

    x: float
    y: float
    wide: float
    tall: float
    highest: float

    @property
    def right(self) -> float:
        """Its right edge."""
        return self.x + self.wide


def inks_of(panel: Panel) -> list[Ink]:
    """Return the colour of each series: its own, or the next of the theme's."""
    left = iter(SERIES * (len(panel.series) // len(SERIES) + 1))
    return [each.ink or next(left) for each in panel.series]


class Inks:
    """The colours of a chart as classes of its sheet, named by colour, so that several charts fit one page.

    `i...` fills, `s...` strokes, and `t...` is what is legible on it.
    """

    def __init__(self) -> None:
        self._names: dict[str, Ink] = {}

    def __call__(self, ink: Ink, letter: str = "i") -> str:
        """Return the attribute that colours an element."""
        name = (ink if isinstance(ink, str) else "-".join(ink)).replace("#", "")
        self._names[name] = ink
        return f'class="{letter}{name}"'

    @property
    def classes(self) -> dict[str, dict[str, str]]:
        """The rules, by theme."""
        rules: dict[str, dict[str, str]] = {}
        for theme, ground in THEMES.items():
            mine = rules[theme] = {
                "bare": f"fill:{ground.idle}",
                "limit": f"stroke:{ground.limit};stroke-width:2.5",
                "over": f"fill:{ground.limit};font-weight:600",
                "peak": f"stroke:{ground.text}",
            }
            for name, ink in self._names.items():
                colour = ink if isinstance(ink, str) else ink[theme == "dark"]
                mine[f"i{name}"] = f"fill:{colour}"
                mine[f"s{name}"] = f"stroke:{colour};fill:none;stroke-width:2;stroke-linejoin:round"
                mine[f"t{name}"] = f"fill:{legible_on(colour)}"
        return rules


# ---- scales


@dataclass(frozen=True)
class Scale:
    """From amounts to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return where an amount is."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        value = math.log10(max(value, 1e-300)) if self.log else value
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def levels(self, axis: Axis, most: int) -> list[tuple[float, str]]:
        """Return the amounts to write on an axis, with their words: its own, or round ones."""
        if axis.at:
            return [(value, axis.unit.words(value)) for value in axis.at]
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            return [(value, axis.unit.words(value)) for value in every if self.low <= value <= self.high]
        if self.low == 0:
            return axis.unit.levels(self.high, most)
        between = (round(value, 12) for value in levels(self.high, most, self.low))
        return [(value, axis.unit.words(value)) for value in between]


def scale_of(axis: Axis, values: Iterable[float], start: float, end: float, *, zero: bool) -> Scale:
    """Return the scale of an axis over values; with `zero` it begins there, unless the axis says otherwise.

    >>> scale = scale_of(Axis(), [2.0, 4.0], 100, 0, zero=True)
    >>> scale(0.0), scale(4.0)
    (100.0, 0.0)
    """
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
    zero = zero and not axis.log
    low = axis.low if axis.low is not None else 0.0 if zero else min(finite, default=0.0)
    high = axis.high if axis.high is not None else max(finite, default=1.0)
    if high <= low:
        pad = abs(low) / 2 or 0.5
        low, high = (0.0, high or 1.0) if zero else (low - pad, high + pad)
    return Scale(low, high, start, end, axis.log)


def upright_axis(
    panel: Panel, values: list[float], room: Room, *, zero: bool
) -> tuple[list[str], Scale, float]:
    """Draw the axis on the left, a line across at each number; return its parts, its scale, and its right edge."""
    down = 14.0 * bool(panel.y.title)
    scale = scale_of(panel.y, values, room.y + room.tall + down, room.y + 6 + down, zero=zero)
    levels = scale.levels(panel.y, 4)
    gutter = max((LETTER * len(words) for _, words in levels), default=0.0) + 10
    parts = [words_at(room.x, room.y + 2, panel.y.title, "faint", SMALL)] if panel.y.title else []
    for value, words in levels:
        at = scale(value)
        parts.append(rule('class="line"', (room.x + gutter, room.right), (at, at)))
        parts.append(words_at(room.x + gutter - 6, at + 4, words, "faint", END))
    return parts, scale, room.x + gutter


def across_axis(axis: Axis, scale: Scale, y: float, edge: float) -> tuple[list[str], float]:
    """Draw the axis below, no two of its numbers touching; return its parts and the y below it."""
    if axis.hidden:
        return [], y
    parts, free = list[str](), -math.inf
    for value, words in scale.levels(axis, max(2, int((scale.end - scale.start) / 70))):
        at, half = scale(value), LETTER * len(words) / 2
        middle = min(at, edge - half)
        if middle - half >= free:
            free = middle + half + 8
            parts.append(rule('class="line"', (at, at), (y, y + 4)))
            parts.append(words_at(middle, y + 16, words, "faint", MIDDLE))
    y += TICKS
    if axis.title:
        parts.append(words_at((scale.start + scale.end) / 2, y + 14, axis.title, "faint", MIDDLE))
        y += TITLE
    return parts, y


# ---- elements


def words_at(x: float, y: float, words: str, look: str = "faint", more: str = "") -> str:
    """Return words as an element of class `look`."""
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}"{more}>{escape(words)}</text>'


def inside(look: str, x: float, y: float, words: str) -> str:
    """Return words in the middle of a bar or a cell."""
    middle = 'font-size="10.5" text-anchor="middle" pointer-events="none"'
    return f'<text {look} {middle} x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def rule(look: str, x: tuple[float, float], y: tuple[float, float], told: str = "") -> str:
    """Return a line from a point to another."""
    line = f'<line {look} x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"'
    return f"{line}><title>{escape(told)}</title></line>" if told else f"{line}/>"


def rect(look: str, x: float, y: float, wide: float, tall: float, told: str) -> str:
    """Return a box with what the pointer is told."""
    size = f'width="{max(wide, 0.3):.1f}" height="{max(tall, 0.3):.1f}"'
    return f'<rect {look} x="{x:.1f}" y="{y:.1f}" {size}><title>{escape(told)}</title></rect>'


def told_of(series: Series, at: int, value: float, unit: Unit) -> str:
    """Return what the pointer is told of a value."""
    return series.told[at] if series.told else f"{series.name}: {unit.words(value)}"
