"""Memory by plan as text, and as SVG: a group of bars per plan, a bar per rank, stacked by category, on one scale.

A bar is what a rank held at the moment when it held most, so that its height is the rank's peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mpkit.common.safe_text import escape
from mpkit.prediction.experiments.compare_memory import MemoryByPlan
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES
from mpkit.views.drawing.sheet import category_classes, keys, sheet
from mpkit.views.memory.series import held_text, levels_of, memory_of
from mpkit.views.theme import MARGIN

__all__ = ["by_plan_svg", "by_plan_text"]

MOST = 16
"""The most ranks of a plan that are drawn."""

TOP, PLOT, GAP, LEFT, FOOT = 56.0, 220.0, 28.0, 112.0, 76.0


class Bar(NamedTuple):
    """What a rank held at its peak, by category, in bytes (or micro-batches, of a simulation)."""

    rank: int
    held: Mapping[str, float]

    @property
    def total(self) -> float:
        """The bar's height."""
        return sum(self.held.values())


def by_plan_text(memory: MemoryByPlan) -> str:
    """Return a line per plan and rank."""
    long = max(map(len, memory.timelines))
    like = max((bar.total for timeline in memory.timelines.values() for bar in _bars(timeline)), default=0)
    lines = ["most memory per rank, by plan"]
    for name, timeline in memory.timelines.items():
        for bar in _bars(timeline):
            parts = ", ".join(
                f"{category} {held_text(timeline, held, like)}" for category, held in bar.held.items() if held
            )
            total = held_text(timeline, bar.total, like)
            lines.append(f"{name:{long}}  rank {bar.rank}: {total}" + (f" ({parts})" if parts else ""))
    return "\n".join(lines)


def by_plan_svg(memory: MemoryByPlan, width: int = 960) -> str:
    """Draw the chart as a standalone SVG document.

    Args:
        memory: what to draw.
        width: in pixels.
    """
    groups = {name: _bars(timeline) for name, timeline in memory.timelines.items()}
    any_timeline = next(iter(memory.timelines.values()))
    shown = {name: bars[:MOST] for name, bars in groups.items()}
    left_out = sum(len(bars) - len(shown[name]) for name, bars in groups.items())
    highest = max((bar.total for bars in shown.values() for bar in bars), default=0) or 1
    left, right, base = MARGIN + LEFT, width - MARGIN, TOP + PLOT
    title = "Most memory per rank, by plan" + (f"; {left_out} more ranks not shown" if left_out else "")
    parts = []
    for level, words in levels_of(any_timeline, highest, 4):
        y = base - level / highest * PLOT
        parts.append(
            f'<line class="line" x1="{left:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="faint" x="{left - 8:g}" y="{y + 4:.1f}" text-anchor="end">'
            f"{words}{' micro-batches' * (any_timeline.clock == 'simulated' and level > 0)}</text>"
        )
    count = sum(len(bars) for bars in shown.values())
    each = min((right - left - GAP * len(shown)) / max(count, 1), 64.0)
    x = left + GAP / 2
    for name, bars in shown.items():
        middle = x + each * len(bars) / 2
        for bar in bars:
            parts.append(_draw_bar(bar, x, each, base, highest, f"{name}, rank {bar.rank}", any_timeline))
            x += each
        parts.append(
            f'<text class="words" x="{middle:.1f}" y="{base + 36:g}" text-anchor="middle">{escape(name)}</text>'
        )
        x += GAP
    parts.append(f'<text class="faint" x="{left - 8:g}" y="{base + 17:g}" text-anchor="end">rank</text>')
    used = [
        (f'class="m{i}"', category)
        for i, category in enumerate(CATEGORIES)
        if any(bar.held[category] for bars in shown.values() for bar in bars)
    ]
    legend = keys(used, base + 52, width)
    return sheet(
        "memory-by-plan", title, str(memory), [*parts, *legend.parts], width, base + FOOT + legend.more,
        head=title, classes=category_classes(),
    )  # fmt: skip


def _bars(timeline: Timeline) -> list[Bar]:
    bars = []
    for rank in range(timeline.world_size):
        memory = memory_of(timeline, rank)
        bars.append(Bar(rank, dict(zip(CATEGORIES, memory.levels[memory.peak].tolist(), strict=True))))
    return bars


def _draw_bar(
    bar: Bar, x: float, width: float, base: float, highest: float, label: str, timeline: Timeline
) -> str:
    """Draw one bar, with the words that the pointer is shown and a screen reader is told."""
    parts, y = [], base
    for i, category in enumerate(CATEGORIES):
        tall = bar.held[category] / highest * PLOT
        if tall:
            y -= tall
            parts.append(
                f'<rect class="m{i}" x="{x + 3:.1f}" y="{y:.1f}" width="{width - 6:.1f}" height="{tall:.1f}">'
                f"<title>{category}: {held_text(timeline, bar.held[category], highest)}</title></rect>"
            )
    parts.append(
        f'<text class="faint" x="{x + width / 2:.1f}" y="{base + 17:g}" text-anchor="middle">{bar.rank}</text>'
    )
    told = f"{label}: {held_text(timeline, bar.total, highest)}"
    return f'<g aria-label="{escape(told, quote=True)}">{"".join(parts)}</g>'
