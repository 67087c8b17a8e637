"""Memory by category and GPU as SVG: small panels on one scale with an axis of bytes and one of time.

The peak of each panel is marked, and said beside its GPU's name.
"""

from __future__ import annotations

import numpy as np

from mpkit.common.safe_text import escape
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES
from mpkit.views.drawing.lanes import short_label
from mpkit.views.drawing.sheet import category_classes, keys, sheet
from mpkit.views.drawing.ticks import levels, ticks
from mpkit.views.memory.series import RankMemory, device_memory, held_text, memory_of, share_text
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
) -> str:
    """Draw the memory of every GPU over time as a standalone SVG document.

    Args:
        timeline: the timeline whose `held` to draw.
        width: in pixels.
        title: a heading; none is drawn if empty.
        theme: "light", "dark", or "auto" for what the reader's system prefers.
        highest: the bytes that the scale reaches at least, so that pictures can be compared.
        across: the most panels side by side; 0: as many as the width has room for, 4 at most.
    """
    shown = min(timeline.world_size, MOST)
    memories = [memory_of(timeline, rank, points=300) for rank in range(shown)]
    highest = max(highest, *(memory.total for memory in memories), 1)
    across = max(1, min(across or min(4, int(width / LEAST)), shown))
    panel = (width - 2 * MARGIN - BESIDE - (across - 1) * GAP) / across
    top = MARGIN + (26 if title else 0)
    tall = HEAD + PANEL + AXIS
    device, name = device_memory(timeline)
    peaks = [f"peak {held_text(timeline, each.total)}{share_text(each.total, device)}" for each in memories]
    body = []
    for rank, memory in enumerate(memories):
        x = MARGIN + BESIDE + rank % across * (panel + GAP)
        y = top + rank // across * (tall + GAP)
        if rank % across == 0:
            body.append(_scale(timeline, highest, y + HEAD + PANEL, width))
        body.append(_panel(memory, short_label(timeline, rank), peaks[rank], x, y, panel, highest))
    bottom = top + -(-shown // across) * (tall + GAP) - 6
    used = [i for i in range(len(CATEGORIES)) if any(memory.levels[:, i].any() for memory in memories)]
    missing = timeline.world_size - shown
    looks = [(f'class="m{category}"', CATEGORIES[category]) for category in used]
    legend = keys(looks, bottom + 4, width, f"and {missing} GPUs more" if missing else "")
    body += legend.parts
    height = legend.y + 26
    foot = f"percentages: of the {held_text(timeline, device)} of one {name}" if device else ""
    words = "; ".join(f"{short_label(timeline, rank)}: {peak}" for rank, peak in enumerate(peaks))
    classes = category_classes()
    for name, ground in THEMES.items():
        classes[name]["peak"] = f"stroke:{ground.text}"
    name = title or "Memory by GPU"
    return sheet(
        "memory", name, words, body, width, height, head=title, foot=foot, theme=theme, classes=classes
    )


def _scale(timeline: Timeline, highest: int, base: float, width: float) -> str:
    """Draw the axis of bytes of one row of panels, with a line across it at each number."""
    parts = []
    for level in levels(highest, 2):
        y = base - level / highest * (PANEL - 4)
        words = f"{level:g}" if timeline.clock == "simulated" else _short(held_text(timeline, level))
        parts.append(
            f'<text class="faint" x="{MARGIN + BESIDE - 6:g}" y="{y + 4:.1f}" text-anchor="end" font-size="11">'
            f"{words}</text>"
            f'<line class="line" x1="{MARGIN + BESIDE:g}" x2="{width - MARGIN:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    return "".join(parts)


def _short(words: str) -> str:
    """Shorten a round amount.

    >>> _short("20.0 MB"), _short("100 MB"), _short("0 B")
    ('20 MB', '100 MB', '0')
    """
    number, unit = words.split(" ")
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return number if number == "0" else f"{number} {unit}"


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


def _steps(x: np.ndarray, y: np.ndarray, *, back: bool = False) -> str:
    """Return a path along a step function: each value holds until the next change."""
    parts = [f"L{x[0]:.1f} {y[0]:.1f}"]
    for i in range(1, len(x)):
        parts.append(f"V{y[i]:.1f}H{x[i]:.1f}" if back else f"H{x[i]:.1f}V{y[i]:.1f}")
    return "".join(parts)
