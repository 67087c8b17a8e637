"""Memory ahead of a run, as a picture: a stacked bar for a rank of each stage beside the device's memory, in GiB.

bars      by category, with the GiB of each category where it is wide enough
totals    what the rank needs and its share of the device
axis      round numbers of GiB; a red line where the device's memory ends
legend    each category with its GiB on the fullest rank
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.common.units import memory_share, memory_text, percent
from mpkit.prediction.cost_model.memory import CATEGORIES, MARGIN_WORD
from mpkit.prediction.cost_model.remedies import MEANING
from mpkit.views.drawing.axes import legible_on
from mpkit.views.drawing.colours import CATEGORY_INKS
from mpkit.views.drawing.sheet import faint_lines, keys
from mpkit.views.theme import MARGIN, REST, THEMES, wrap_words

if TYPE_CHECKING:
    from mpkit.prediction.cost_model.estimate import Estimate

__all__ = ["FITS_CLASSES", "memory_bars"]

GIB = 2**30
LEAST = 1 << 20
"""Bytes below which a category is not in the legend."""

ROW, BAR, TOP, MOST = 30.0, 20.0, 44.0, 16
LEFT, RIGHT = MARGIN + 90, 172.0
"""Pixels for the ranks, left of the bars, and for their totals, right of them."""

INKS = {theme: [CATEGORY_INKS[name][theme == "dark"] for name in CATEGORIES] for theme in THEMES}
FITS_CLASSES = {
    theme: {
        **{f"f{i}": f"fill:{ink}" for i, ink in enumerate(INKS[theme])},
        **{f"n{i}": f"fill:{legible_on(ink)};font-size:11px" for i, ink in enumerate(INKS[theme])},
        "f8": f"fill:{REST};opacity:.45",
        "limit": f"stroke:{ground.limit};stroke-width:2.5",
        "over": f"fill:{ground.limit};font-weight:600",
    }
    for theme, ground in THEMES.items()
}
"""The colours of the bars as classes of a sheet, for each theme."""


def _share(estimate: Estimate, nbytes: float) -> str:
    """Return bytes as GiB of the device's, and the percentage."""
    if estimate.available == inf:
        return memory_text(nbytes)
    return f"{memory_share(nbytes, estimate.available)}, {percent(nbytes / estimate.available)}"


def _limit(estimate: Estimate) -> float:
    """Return the bytes at which the red line stands; 0, where none is drawn, if the device's memory is not known."""
    return 0.0 if estimate.available == inf else estimate.available


def memory_bars(estimate: Estimate, top: float, width: float) -> tuple[list[str], float]:
    """Draw the bars, their axis and their legend from `top` down; return the elements, and the y below them."""
    stages = estimate.stage_memory
    room = width - LEFT - RIGHT - MARGIN
    most = (
        max(_limit(estimate), *(sum(memory.values()) + estimate.margin(memory) for memory in stages)) * 1.02
    )
    scale = room / most
    body = []
    for stage, memory in enumerate(stages[:MOST]):
        body.append(_bar(estimate, stage, memory, top + stage * ROW, scale))
    bottom = top + min(len(stages), MOST) * ROW
    body += _axis(estimate, top, bottom, scale, most)
    bottom += 40
    if len(stages) > MOST:
        body.append(_words(MARGIN, bottom, f"and {len(stages) - MOST} more stages", "faint"))
        bottom += 20
    legend, bottom = _legend(estimate, bottom, width)
    return [*body, *legend], bottom + 12


def _bar(estimate: Estimate, stage: int, memory: dict[str, float], y: float, scale: float) -> str:
    per_stage = estimate.layout.ranks // estimate.layout.pp
    first, last = stage * per_stage, (stage + 1) * per_stage - 1
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    x, middle = LEFT, y + 14
    parts = [_words(MARGIN, middle, ranks)]
    pieces = [(i, name, MEANING[name], memory[name]) for i, name in enumerate(CATEGORIES)]
    pieces.append((8, MARGIN_WORD, "what an allocator reserves beside it", estimate.margin(memory)))
    for i, name, meaning, nbytes in pieces:
        wide, number = nbytes * scale, f"{nbytes / GIB:.1f}"
        if wide > 0:
            parts.append(
                f'<rect class="f{i}" x="{x:.1f}" y="{y:g}" width="{wide:.1f}" height="{BAR:g}">'
                f"<title>{name}, {meaning}: {memory_text(nbytes)}</title></rect>"
            )
            room = 7 * len(number) + 6
            crossed = abs(x + wide / 2 - LEFT - _limit(estimate) * scale) < room / 2
            if wide > room and not crossed and i < len(CATEGORIES):
                parts.append(
                    f'<text class="n{i}" x="{x + wide / 2:.1f}" y="{middle:g}" text-anchor="middle" '
                    f'pointer-events="none">{number}</text>'
                )
            x += wide
    needed = sum(memory.values()) + estimate.margin(memory)
    x = max(x, LEFT + _limit(estimate) * scale) + 8
    parts.append(
        _words(x, middle, _share(estimate, needed), "over" if needed > estimate.available else "words")
    )
    return f'<g aria-label="{ranks}: {_share(estimate, needed)}">{"".join(parts)}</g>'


def _axis(estimate: Estimate, top: float, bottom: float, scale: float, most: float) -> list[str]:
    """Draw round numbers of GiB below the bars, and the line where the device's memory ends."""
    limit = LEFT + _limit(estimate) * scale
    line = (
        f'<line class="line" x1="{LEFT:g}" x2="{LEFT + most * scale:.1f}" y1="{bottom:g}" y2="{bottom:g}"/>'
    )
    parts = [line]
    step = next(step for step in (1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1 << 20) if most / GIB / step <= 6)
    for number in range(0, int(most / GIB) + 1, step):
        x = LEFT + number * GIB * scale
        parts.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:g}" y2="{bottom + 4:g}"/>')
        parts.append(
            f'<text class="faint" x="{x:.1f}" y="{bottom + 17:g}" text-anchor="middle" font-size="11">'
            f"{number}{' GiB' * (number == 0)}</text>"
        )
    if not _limit(estimate):
        return parts
    device = escape(estimate.hardware.device.name)
    words = f"the memory of one {device}: {memory_text(estimate.available)}"
    parts.append(
        f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{top - 6:g}" y2="{bottom + 4:g}">'
        f"<title>{words}</title></line>"
    )
    return parts


def _legend(estimate: Estimate, y: float, width: float) -> tuple[list[str], float]:
    """Draw a square for each category that is there, with its GiB on the fullest rank; return the y below."""
    memory = estimate.memory[estimate.fullest]
    listed = [
        (f"f{i}", f"{name} {memory_text(memory[name], estimate.needed)}")
        for i, name in enumerate(CATEGORIES)
        if memory[name] >= LEAST
    ]
    listed.append(("f8", f"{MARGIN_WORD} {memory_text(estimate.margin(memory), estimate.needed)}"))
    parts, _, y, _ = keys(((f'class="{look}"', words) for look, words in listed), y, width)
    device = estimate.hardware.device.name
    told = f"on rank {estimate.fullest}"
    if _limit(estimate):
        told += f"; red line: one {device} has {memory_text(estimate.available)}"
    lines = wrap_words(told, width - 2 * MARGIN)
    return [*parts, *faint_lines(lines, y + 34)], y + 20 + 20 * len(lines)


def _words(x: float, y: float, words: str, look: str = "words") -> str:
    return f'<text class="{look}" x="{x:.1f}" y="{y:g}">{escape(words)}</text>'
