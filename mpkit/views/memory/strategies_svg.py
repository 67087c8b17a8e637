"""Memory by strategy as SVG: a stacked bar per rank on an axis of memory, and the formula as a line across it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.common.units import memory_text
from mpkit.trace import CATEGORIES
from mpkit.views.drawing.sheet import category_classes, keys, sheet
from mpkit.views.drawing.ticks import memory_levels
from mpkit.views.theme import ALARM, MARGIN

if TYPE_CHECKING:
    from mpkit.prediction.experiments.memory_by_strategy import MemoryByStrategy, MemoryRow

__all__ = ["shown_of", "strategies_svg"]

MOST = 8
"""The most ranks of a strategy that are drawn; the others do the same as the first."""

HEIGHT, TOP, GAP, LEFT = 220.0, 46.0, 26.0, 56.0


def shown_of(memory: MemoryByStrategy) -> tuple[list[MemoryRow], int]:
    """Return the rows that are drawn, and the number of those that are not."""
    rows = [row for row in memory.rows if row.rank < MOST]
    return rows, len(memory.rows) - len(rows)


def strategies_svg(memory: MemoryByStrategy, width: int = 960) -> str:
    """Draw the chart as a standalone SVG document.

    Args:
        memory: what to draw.
        width: in pixels.
    """
    rows, left_out = shown_of(memory)
    strategies = memory.strategies
    highest = max((max(sum(row.held.values()), sum(row.formula.values())) for row in rows), default=1) or 1
    left = MARGIN + LEFT
    space = (width - left - MARGIN - GAP * (len(strategies) - 1)) / max(len(rows), 1)
    more = f"; {left_out} more ranks not shown" if left_out else ""
    title = f"Memory by strategy, {memory.how}{more}"
    base, x = TOP + HEIGHT, left
    parts = _scale(highest, left, width - MARGIN, base)
    for name in strategies:
        mine = [row for row in rows if row.strategy == name]
        begin = x
        for row in mine:
            parts.append(_bar(row, x, min(space, 64.0), base, highest))
            x += min(space, 64.0)
        middle = (begin + x) / 2
        parts.append(
            f'<text class="words" x="{middle:.1f}" y="{base + 32:g}" text-anchor="middle">{escape(name)}</text>'
        )
        x += GAP
    used = [i for i, category in enumerate(CATEGORIES) if any(row.held[category] for row in rows)]
    legend = keys([(f'class="m{i}"', CATEGORIES[i]) for i in used], base + 46, width)
    parts += [f'<text class="faint" x="{left - 8:g}" y="{base + 15:g}" text-anchor="end">rank</text>']
    body = [*parts, *legend.parts, _formula_key(legend.y + 30)]
    return sheet(
        "strategies", title, str(memory), body, width, legend.y + 42, head=title, classes=category_classes()
    )


def _scale(highest: float, left: float, right: float, base: float) -> list[str]:
    """Draw lines at round amounts of memory, with their words."""
    parts = []
    for level, words in memory_levels(highest, 4):
        y = base - level / highest * HEIGHT
        parts.append(
            f'<line class="line" x1="{left:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="faint" x="{left - 8:g}" y="{y + 4:.1f}" text-anchor="end">{words}</text>'
        )
    return parts


def _bar(row: MemoryRow, x: float, width: float, base: float, highest: float) -> str:
    parts, y = [], base
    for i, category in enumerate(CATEGORIES):
        tall = row.held[category] / highest * HEIGHT
        if tall:
            y -= tall
            parts.append(
                f'<rect class="m{i}" x="{x + 3:.1f}" y="{y:.1f}" width="{width - 6:.1f}" height="{tall:.1f}">'
                f"<title>{category}: {memory_text(row.held[category], highest)}</title></rect>"
            )
    line = base - sum(row.formula.values()) / highest * HEIGHT
    parts.append(
        f'<line stroke="{ALARM}" stroke-width="2.5" x1="{x:.1f}" x2="{x + width:.1f}" y1="{line:.1f}" '
        f'y2="{line:.1f}">'
        f"<title>formula: {memory_text(sum(row.formula.values()), highest)}</title></line>"
    )
    parts.append(
        f'<text class="faint" x="{x + width / 2:.1f}" y="{base + 15:g}" text-anchor="middle">{row.rank}</text>'
    )
    label = f"{row.strategy}, rank {row.rank}: {memory_text(sum(row.held.values()), highest)}"
    return f'<g aria-label="{escape(label)}">{"".join(parts)}</g>'


def _formula_key(y: float) -> str:
    x, middle = MARGIN, y - 4
    return (
        f'<line stroke="{ALARM}" stroke-width="2.5" x1="{x:g}" x2="{x + 14:g}" y1="{middle:g}" y2="{middle:g}"/>'
        f'<text class="words" x="{x + 20:g}" y="{y:g}">params + grads + optimizer by the formula</text>'
    )
