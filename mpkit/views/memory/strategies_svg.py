"""Memory by strategy as SVG: a stacked bar per rank, and the formula as a line across it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.common.units import memory_text
from mpkit.trace import CATEGORIES
from mpkit.views.drawing.sheet import category_classes, keys, sheet
from mpkit.views.theme import ALARM, MARGIN

if TYPE_CHECKING:
    from mpkit.prediction.experiments.memory_by_strategy import MemoryByStrategy, MemoryRow

__all__ = ["shown_of", "strategies_svg"]

MOST = 8
"""The most ranks of a strategy that are drawn; the others do the same as the first."""

HEIGHT, TOP, GAP = 220.0, 46.0, 26.0


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
    space = (width - 2 * MARGIN - GAP * (len(strategies) - 1)) / max(len(rows), 1)
    base = TOP + HEIGHT
    parts, x = [], MARGIN
    for name in strategies:
        mine = [row for row in rows if row.strategy == name]
        left = x
        for row in mine:
            parts.append(_bar(row, x, min(space, 64.0), base, highest))
            x += min(space, 64.0)
        middle = (left + x) / 2
        parts.append(
            f'<text class="words" x="{middle:.1f}" y="{base + 32:g}" text-anchor="middle">{escape(name)}</text>'
        )
        x += GAP
    more = f"; {left_out} more ranks not shown" if left_out else ""
    title = f"Memory by strategy, {memory.how}{more}"
    height = base + 66
    body = [*parts, _legend(base + 54, width)]
    return sheet(
        "strategies", title, str(memory), body, width, height, head=title, classes=category_classes()
    )


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


def _legend(y: float, width: float) -> str:
    parts, x, y, _ = keys(
        ((f'class="m{i}"', category) for i, category in enumerate(CATEGORIES)), y - 10, width
    )
    parts.append(
        f'<line stroke="{ALARM}" stroke-width="2.5" x1="{x:g}" x2="{x + 18:g}" y1="{y - 4:g}" y2="{y - 4:g}"/>'
        f'<text class="words" x="{x + 24:g}" y="{y:g}">params + grads + optimizer by the formula</text>'
    )
    return "".join(parts)
