"""A comparison as SVG: timelines below each other on one axis, and below each where its time goes.

picture    a timeline, on the scale of the longest (`svg`)
bar        work and idle time by cause, averaged over ranks, on the same scale
legend     the colours of the bars
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.common.units import seconds
from mpkit.timeline.idleness import CAUSES
from mpkit.timeline.notes import failure_notes
from mpkit.views.drawing.colours import CAUSE_INKS
from mpkit.views.drawing.sheet import keys, sheet
from mpkit.views.theme import MARGIN
from mpkit.views.timeline.picture import picture
from mpkit.views.timeline.svg import GUTTER, gutter_of, svg

if TYPE_CHECKING:
    from mpkit.timeline.comparison import ComparedStep, Comparison

__all__ = ["bars_svg", "comparison_svg"]

BAR, SPACE = 16.0, 44.0


def comparison_svg(comparison: Comparison, width: int = 960) -> str:
    """Draw the comparison as a standalone SVG document.

    Args:
        comparison: what to draw.
        width: in pixels.
    """
    room = max(row.timeline.step_time for row in comparison.rows)
    gutter = max(gutter_of(picture(row.timeline)) for row in comparison.rows)
    span = width - gutter - 2 * MARGIN
    parts: list[str] = []
    y = 0.0
    for row in comparison.rows:
        inner = svg(
            row.timeline,
            width,
            title=row.name + " (failed)" * bool(failure_notes(row.timeline.meta)),
            room=room,
            gutter=gutter,
        )
        tall = float(re.search(r'height="(\d+)"', inner)[1])  # type: ignore[index]
        inner = inner.replace("<svg ", f'<svg y="{y:g}" ', 1).replace(
            "mpkit-idle", f"mpkit-idle-{len(parts)}"
        )
        parts.append(inner)
        y += tall
        parts.append(_bar(row, MARGIN + gutter, y, span / room if room else 0.0))
        y += SPACE
    return _document(comparison, width, parts, y + 6)


def bars_svg(comparison: Comparison, width: int = 960) -> str:
    """Draw where the time of each timeline goes, without the timelines: one bar per timeline, on one axis.

    Args:
        comparison: what to draw.
        width: in pixels.
    """
    room = max(row.timeline.makespan for row in comparison.rows)
    scale = (width - GUTTER - 2 * MARGIN) / room if room else 0.0
    parts = [
        f'<text class="words" x="{MARGIN:g}" y="24" font-size="13" font-weight="600">'
        "A step's time, averaged over ranks</text>"
    ]
    y = 38.0
    for row in comparison.rows:
        parts.append(_bar(row, MARGIN + GUTTER, y, scale, row.name))
        y += BAR + 8
    return _document(comparison, width, parts, y + 16)


def _document(comparison: Comparison, width: int, parts: list[str], y: float) -> str:
    """Put a legend below the parts, its first line at `y`, and a sheet around both."""
    title = " and ".join(row.name for row in comparison.rows)
    seen = [what for what in CAUSES if any(row.idle[what] > 0 for row in comparison.rows)]
    words = {"work": "work", **{what: f"idle: {what}" for what in seen}}
    legend = keys(((f'fill="{CAUSE_INKS[what]}"', word) for what, word in words.items()), y - 10, width)
    return sheet("compare", title, str(comparison), [*parts, *legend.parts], width, legend.y + 34)


def _bar(row: ComparedStep, x: float, y: float, scale: float, label: str = "mean of ranks") -> str:
    """Draw work, and idle time by cause, as one bar that is as long as the makespan."""
    parts = [
        f'<text class="faint" x="{x - 10:g}" y="{y + 12:g}" text-anchor="end">'
        f"{escape(label if len(label) <= 16 else label[:15] + '…')}<title>{escape(label)}</title></text>",
    ]
    for what, value in {"work": sum(row.work.values()), **row.idle}.items():
        long = value * scale
        if long > 0.3:
            words = f"{what}: {seconds(value)}"
            parts.append(
                f'<rect fill="{CAUSE_INKS[what]}" x="{x:.2f}" y="{y:g}" width="{max(long - 0.8, 0.4):.2f}" '
                f'height="{BAR:g}"><title>{escape(words)}</title></rect>'
            )
        x += long
    return f'<g aria-label="{escape(row.name)}: where the time goes">{"".join(parts)}</g>'
