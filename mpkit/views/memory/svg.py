"""Memory by category and GPU as SVG: small panels on one scale with an axis of bytes and one of time.

The peak of each panel is marked, and said beside its GPU's name.
"""

from __future__ import annotations

from math import inf

import numpy as np

from mpkit.common.safe_text import escape
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES
from mpkit.views.drawing.lanes import short_label
from mpkit.views.drawing.sheet import category_classes, keys, sheet
from mpkit.views.drawing.ticks import ticks
from mpkit.views.memory.peak import UNMEASURED, peak_words, repeated_from
from mpkit.views.memory.series import RankMemory, device_memory, held_text, levels_of, memory_of, share_text
from mpkit.views.theme import MARGIN, THEMES

__all__ = ["highest_of", "memory_svg"]

PANEL, GAP, HEAD, AXIS = 92.0, 18.0, 18.0, 18.0
BESIDE = 44.0
"""The room for the axis of bytes, left of each row of panels, which share it."""
LEAST = 220
"""Pixels of the picture's width for each panel, at least."""
MOST = 64
"""The most panels; if there are more GPUs, the first are shown, and a note says so."""


def highest_of(timeline: Timeline) -> int:
    """Return the highest peak of any GPU, in bytes."""
    return max((held["total"] for held in timeline.peak_memory_of_run), default=0)


def memory_svg(
    timeline: Timeline,
    width: int = 960,
    *,
    title: str = "",
    theme: str = "auto",
    highest: int = 0,
    across: int = 0,
    like: float = 0,
) -> str:
    """Draw the memory of every GPU over time as a standalone SVG document.

    Args:
        timeline: the timeline whose `held` to draw.
        width: in pixels.
        title: a heading; none is drawn if empty.
        theme: "light", "dark", or "auto" for what the reader's system prefers.
        highest: the bytes that the scale reaches at least, so that pictures can be compared.
        across: the most panels side by side; 0: as many as the width has room for, 4 at most.
        like: the largest amount shown beside the picture, whose unit it has too; 0: its own largest.
    """
    shown = min(timeline.world_size, MOST)
    memories = [memory_of(timeline, rank, points=300) for rank in range(shown)]
    highest = max(highest, *(memory.total for memory in memories), 1)
    across = max(1, min(across or min(4, int(width / LEAST)), shown))
    panel = (width - 2 * MARGIN - BESIDE - (across - 1) * GAP) / across
    top = MARGIN + (26 if title else 0)
    tall = HEAD + PANEL + AXIS
    device, name = device_memory(timeline)
    repeats = repeated_from(timeline) - (float(timeline.spans["start"].min()) if len(timeline.spans) else 0.0)
    like = max(like, *(memory.total for memory in memories))
    peaks = [
        f"peak {held_text(timeline, each.total, like)}{share_text(each.total, device)}" for each in memories
    ]
    body = []
    for rank, memory in enumerate(memories):
        x = MARGIN + BESIDE + rank % across * (panel + GAP)
        y = top + rank // across * (tall + GAP)
        if rank % across == 0:
            body.append(_scale(timeline, highest, like, y + HEAD + PANEL, width))
        body.append(_panel(memory, short_label(timeline, rank), peaks[rank], x, y, panel, highest))
        if repeats < inf:
            body.append(_veil(memory, repeats, x, y + HEAD, panel))
    bottom = top + -(-shown // across) * (tall + GAP) - 6
    used = [i for i in range(len(CATEGORIES)) if any(memory.levels[:, i].any() for memory in memories)]
    missing = timeline.world_size - shown
    looks = [(f'class="m{category}"', CATEGORIES[category]) for category in used]
    legend = keys(looks, bottom + 4, width, f"and {missing} GPUs more" if missing else "")
    body += legend.parts
    height = legend.y + 26
    told = [peak_words(timeline, like)]
    told += [f"Percentages are of the {held_text(timeline, device)} of one {name}."] if device else []
    told += [UNMEASURED] if repeats < inf else []
    foot = " ".join(told)
    words = "; ".join(f"{short_label(timeline, rank)}: {peak}" for rank, peak in enumerate(peaks))
    classes = category_classes()
    for name, ground in THEMES.items():
        classes[name]["peak"] = f"stroke:{ground.text}"
    name = title or "Memory by GPU"
    return sheet(
        "memory", name, words, body, width, height, head=title, foot=foot, theme=theme, classes=classes
    )


def _scale(timeline: Timeline, highest: int, like: float, base: float, width: float) -> str:
    """Draw the axis of bytes of one row of panels, with a line across it at each number."""
    parts = []
    for level, words in levels_of(timeline, highest, 2, like):
        y = base - level / highest * (PANEL - 4)
        parts.append(
            f'<text class="faint" x="{MARGIN + BESIDE - 6:g}" y="{y + 4:.1f}" text-anchor="end" font-size="11">'
            f"{words}</text>"
            f'<line class="line" x1="{MARGIN + BESIDE:g}" x2="{width - MARGIN:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    return "".join(parts)


def _panel(memory: RankMemory, label: str, peak: str, x: float, y: float, width: float, highest: int) -> str:
    """Draw one GPU: its categories stacked over time, a line and a number at its peak."""
    duration = float(memory.times[-1]) or 1.0
    base = y + HEAD + PANEL
    stack = np.cumsum(memory.levels, axis=1) / highest * (PANEL - 4)
    along = x + memory.times / duration * width
    parts = [
        f'<text class="words" x="{x:g}" y="{y + 11:g}">{escape(label)}</text>',
        f'<text class="faint" x="{x + width:g}" y="{y + 11:g}" text-anchor="end">{escape(peak)}</text>',
    ]
    for category in range(memory.levels.shape[1]):
        if memory.levels[:, category].any():
            below = stack[:, category - 1] if category else np.zeros(len(along))
            path = _steps(along, base - stack[:, category]) + _steps(
                along[::-1], base - below[::-1], back=True
            )
            parts.append(f'<path class="m{category}" d="M{path[1:]}Z"/>')
    at, high = along[memory.peak], base - stack[memory.peak, -1]
    for time, words in ticks(duration, max(3, round(width / 80))):
        at_tick = x + time / duration * width
        anchor = "start" if time == 0 else "end" if at_tick + 14 > x + width else "middle"
        parts.append(
            f'<line class="line" x1="{at_tick:.1f}" x2="{at_tick:.1f}" y1="{base:g}" y2="{base + 4:g}"/>'
        )
        parts.append(
            f'<text class="faint" x="{at_tick:.1f}" y="{base + 16:g}" text-anchor="{anchor}" font-size="11">'
            f"{words}</text>"
        )
    parts.append(
        f'<line class="peak" stroke-dasharray="2 2" x1="{x:g}" x2="{x + width:g}" y1="{high:.1f}" y2="{high:.1f}"/>'
        f'<circle class="words" cx="{at:.1f}" cy="{high:.1f}" r="2.5"/>'
    )
    return f'<g aria-label="{escape(label)}">{"".join(parts)}</g>'


def _veil(memory: RankMemory, start: float, x: float, y: float, width: float) -> str:
    """Draw the ground over the steps that were not measured, from the first of them on."""
    left = x + min(start / (float(memory.times[-1]) or 1.0), 1.0) * width
    return (
        f'<rect class="ground" opacity="0.5" x="{left:.1f}" y="{y:g}" width="{x + width - left:.1f}" '
        f'height="{PANEL:g}"/>'
        f'<line class="peak" stroke-dasharray="4 3" x1="{left:.1f}" x2="{left:.1f}" y1="{y:g}" y2="{y + PANEL:g}"/>'
    )


def _steps(x: np.ndarray, y: np.ndarray, *, back: bool = False) -> str:
    """Return a path along a step function: each value holds until the next change."""
    parts = [f"L{x[0]:.1f} {y[0]:.1f}"]
    for i in range(1, len(x)):
        parts.append(f"V{y[i]:.1f}H{x[i]:.1f}" if back else f"H{x[i]:.1f}V{y[i]:.1f}")
    return "".join(parts)
