"""A standalone SVG sheet: the frame around charts that are drawn as SVG.

ground     a rounded rectangle in the theme's colour, and a heading on it that wraps to the width
classes    colours as classes, one block per theme, so that one file serves readers of both, and paper
keys       a legend: a coloured square and a word each, on as many lines as it needs
ticks      round numbers for axes: of time, and of amounts such as bytes

A sheet's classes: `ground` and `words`, `faint`, `line` as in `Theme`.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from mpkit.common.safe_text import escape
from mpkit.common.units import memory_unit, seconds, trim_zeros
from mpkit.views.theme import FONT, HEADING, MARGIN, TEXT, THEMES, style_block, wrap_words


def ticks(duration: float, most: int) -> list[tuple[float, str]]:
    """Return at most `most` + 1 times from 0 to `duration`, a round step (1, 2 or 5 x a power of ten) apart.

    >>> [text for _, text in ticks(33.0, 8)]
    ['0', '5 s', '10 s', '15 s', '20 s', '25 s', '30 s']
    >>> [text for _, text in ticks(0.0031, 4)]
    ['0', '1 ms', '2 ms', '3 ms']
    """
    return [(time, trim_zeros(seconds(time))) for time in levels(duration, most)]


def memory_levels(highest: float, most: int, like: float = 0) -> list[tuple[float, str]]:
    """Return at most `most` + 1 amounts of memory from 0 to `highest`, round in its unit.

    Their unit is that of `like`, the largest amount beside the axis, if that is more than `highest`.

    >>> [words for _, words in memory_levels(45 * 2**30, 3)]
    ['0', '20 GiB', '40 GiB']
    """
    factor, unit = memory_unit(max(highest, like))
    return [
        (level * factor, f"{level:g} {unit}" if level else "0") for level in levels(highest / factor, most)
    ]


def levels(highest: float, most: int, lowest: float = 0.0) -> list[float]:
    """Return at most `most` + 1 amounts between two, a round step (1, 2 or 5 x a power of ten) apart.

    An axis that begins at 0 has a number besides it: where there is room for one, it is the largest round one.

    >>> levels(251e6, 3), levels(45, 1), levels(7.5, 3, 2.5)
    ([0.0, 100000000.0, 200000000.0], [0.0, 20.0], [4.0, 6.0])
    """
    length = highest - lowest
    if length <= 0 or not math.isfinite(length):
        return []
    power = 10.0 ** math.floor(math.log10(length / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= length * (1 - 1e-9))
    first, last = math.ceil(lowest / step - 1e-9), math.floor(highest / step + 1e-9)
    if first == last == 0:
        last = 1
        step = max(power * factor for factor in (0.1, 0.2, 0.5, 1, 2, 5) if power * factor <= highest)
    return [i * step for i in range(first, last + 1)]


LINE = 20.0
"""Pixels from line to line."""


def sheet(
    kind: str, title: str, told: str, body: Iterable[str], width: float, height: float,
    *, head: str = "", below: str = "", foot: str = "",
    classes: dict[str, dict[str, str]] | None = None,
) -> str:  # fmt: skip
    """Return a standalone SVG document.

    >>> print(sheet("demo", "A title", "In words.", [], 300, 40, head="A heading").splitlines()[-2])
    <text class="words" x="16" y="28" font-size="15" font-weight="600">A heading</text>

    Args:
        kind: the kind of chart: the document's class is "mpkit-" and this.
        title: its name, shown on hovering and read to those who cannot see it.
        told: the chart in words, for readers who cannot see it.
        body: the elements to draw, in order; below a heading, and `below` it, of one line each.
        width, height: in pixels; lines that do not fit the width wrap, and push the body down.
        head: its heading.
        below: a line of faint words below the heading.
        foot: faint words below the body; their lines add to the height.
        classes: more rules by class, for each theme.
    """
    room = width - 2 * MARGIN
    lines, more = wrap_words(head, room, HEADING, bold=True), wrap_words(below, room)
    top = [
        f'<text class="words" x="{MARGIN:g}" y="{28 + LINE * i:g}" font-size="{HEADING}" font-weight="600">'
        f"{escape(line)}</text>"
        for i, line in enumerate(lines)
    ]
    top += faint_lines(more, 28 + LINE * len(lines))
    feet = wrap_words(foot, room)
    down = LINE * (max(len(lines) - 1, 0) + max(len(more) - 1, 0))
    drawn = [f'<g transform="translate(0 {down:g})">', *body, "</g>"] if down else [*body]
    drawn += faint_lines(feet, height + down + 10)
    tall = height + down + (LINE * len(feet) + 4 if feet else 0)
    size = f'width="{width:g}" height="{tall:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mpkit-{kind}" role="img" {size} '
            f'viewBox="0 0 {width:g} {tall:.0f}" font-family="{FONT}" font-size="{TEXT}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(told)}</desc>",
            f"<style>{style_block(lambda name: _rules(kind, name, classes or {}))}</style>",
            f'<rect class="ground" {size} rx="8"/>',
            *top,
            *drawn,
            "</svg>",
        ]
    )


def _rules(kind: str, theme: str, classes: dict[str, dict[str, str]]) -> str:
    ground = THEMES[theme]
    rules = {
        "ground": f"fill:{ground.ground}",
        "words": f"fill:{ground.text}",
        "faint": f"fill:{ground.faint}",
        "line": f"stroke:{ground.line}",
        **classes.get(theme, {}),
    }
    return "".join(f".mpkit-{kind} .{of}{{{rule}}}" for of, rule in rules.items())


def faint_lines(lines: Iterable[str], y: float) -> list[str]:
    """Draw faint words, a line below the other, the first at `y`."""
    return [
        f'<text class="faint" x="{MARGIN:g}" y="{y + LINE * i:g}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]


class KeyLines(NamedTuple):
    """A legend: its elements, where it ends, and how much it is taller than one line, in pixels."""

    parts: list[str]
    x: float
    y: float
    more: float


def keys(
    looks: Iterable[tuple[str, str]], y: float, width: float, last: str = "", left: float = MARGIN
) -> KeyLines:
    """Draw a legend, the squares of its first line from `y` down.

    Args:
        looks: for each key, the attribute that colours it, such as `class="m0"`, and its word; with `data-thin` in it,
            it is drawn as a line.
        y: the upper edge, in pixels.
        width: of the picture.
        last: faint words behind the last key.
        left: where its lines begin.
    """
    parts: list[str] = []
    x, top = left, y
    for look, word in [*looks, *([("", last)] if last else [])]:
        square = 20 if look else 0
        room = square + 7 * len(word) + 14
        if x + room - 14 > width - MARGIN and x > left:
            x, y = left, y + LINE
        if look:
            thin = "data-thin" in look
            tall = f'y="{y + 4:g}" height="3"' if thin else f'y="{y:g}" height="12"'
            parts.append(f'<rect {look} x="{x:g}" {tall} width="14" rx="{1 if thin else 2}"/>')
        shown = "words" if look else "faint"
        parts.append(f'<text class="{shown}" x="{x + square:g}" y="{y + 10.5:g}">{escape(word)}</text>')
        x += room
    return KeyLines(parts, x, y, y - top)
