"""A standalone SVG sheet: the frame around charts that are drawn as SVG.

ground     a rounded rectangle in the theme's colour, and a heading on it
classes    colours as classes, one block per theme, so that one file serves readers of both
keys       a legend: a coloured square and a word each

A sheet's classes: `ground` and `words`, `faint`, `line` as in `Theme`; `m0`, `m1`, ... are the categories of memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpkit.common.safe_text import escape
from mpkit.trace import CATEGORIES
from mpkit.views.drawing.colours import CATEGORY_INKS, FONT, THEMES

__all__ = ["MARGIN", "category_classes", "heading", "keys", "sheet"]

MARGIN = 16.0


def sheet(
    kind: str, title: str, told: str, body: Iterable[str], width: float, height: float,
    *, theme: str = "auto", classes: dict[str, dict[str, str]] | None = None,
) -> str:  # fmt: skip
    """Return a standalone SVG document.

    >>> sheet("demo", "A title", "In words.", [heading("A title")], 300, 40).splitlines()[1:3]
    ['<title>A title</title>', '<desc>In words.</desc>']

    Args:
        kind: the kind of chart: the document's class is "mpkit-" and this.
        title: its name, shown on hovering and read to those who cannot see it.
        told: the chart in words, for readers who cannot see it.
        body: the elements to draw, in order.
        width, height: in pixels.
        theme: "light", "dark", or "auto" for what the reader's system prefers.
        classes: more rules by class, for each theme.
    """
    size = f'width="{width:g}" height="{height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="mpkit-{kind}" role="img" {size} '
            f'viewBox="0 0 {width:g} {height:.0f}" font-family="{FONT}" font-size="12">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(told)}</desc>",
            _style(kind, theme, classes or {}),
            f'<rect class="ground" {size} rx="8"/>',
            *body,
            "</svg>",
        ]
    )


def _style(kind: str, theme: str, classes: dict[str, dict[str, str]]) -> str:
    def block(name: str) -> str:
        ground = THEMES[name]
        rules = {
            "ground": f"fill:{ground.ground}",
            "words": f"fill:{ground.text}",
            "faint": f"fill:{ground.faint}",
            "line": f"stroke:{ground.line}",
            **classes.get(name, {}),
        }
        return "".join(f".mpkit-{kind} .{of}{{{rule}}}" for of, rule in rules.items())

    dark = f"@media (prefers-color-scheme: dark){{{block('dark')}}}" if theme == "auto" else ""
    return f"<style>{block('light' if theme == 'auto' else theme)}{dark}</style>"


def category_classes() -> dict[str, dict[str, str]]:
    """Return the classes of the categories of memory."""
    inks = [CATEGORY_INKS[word] for word in CATEGORIES]
    return {name: {f"m{i}": f"fill:{ink[name == 'dark']}" for i, ink in enumerate(inks)} for name in THEMES}


def heading(words: str, y: float = 28.0) -> str:
    """Draw a sheet's first line."""
    return f'<text class="words" x="{MARGIN:g}" y="{y:g}" font-size="15" font-weight="600">{escape(words)}</text>'


def keys(looks: Iterable[tuple[str, str]], y: float) -> tuple[list[str], float]:
    """Draw a legend's line, its squares from `y` down; returns its elements, and the x at which it ends.

    Args:
        looks: for each key, the attribute that colours it, such as `class="m0"`, and its word.
        y: the upper edge, in pixels.
    """
    parts: list[str] = []
    x = MARGIN
    for look, word in looks:
        parts.append(f'<rect {look} x="{x:g}" y="{y:g}" width="14" height="12" rx="2"/>')
        parts.append(f'<text class="words" x="{x + 20:g}" y="{y + 10.5:g}">{escape(word)}</text>')
        x += 20 + 7 * len(word) + 14
    return parts, x
