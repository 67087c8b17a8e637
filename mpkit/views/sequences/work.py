"""The attention that each rank computed: a bar per rank, with those that share sequences together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.views.drawing.axes import ink_of
from mpkit.views.drawing.sheet import sheet
from mpkit.views.theme import MARGIN

if TYPE_CHECKING:
    from mpkit.trace.attention_work import AttentionWork

__all__ = ["work_svg", "work_text"]

TOP, LABEL, TALL, GAP, NUMBERS, WIDEST = 44.0, 64.0, 16.0, 10.0, 150.0, 30


def work_text(work: AttentionWork) -> str:
    """Return a line per rank of the last step: its pairs as a bar, and beside the mean of its group.

    Args:
        work: what to show.
    """
    last, most = work.by_rank, max(*work.by_rank, 1.0)
    step = work.first + len(work.pairs) - 1
    lines = [f"Attention in step {step}: pairs of a query and a key, in all heads and layers of a rank"]
    for group in work.groups:
        mean = sum(last[rank] for rank in group) / len(group) or 1.0
        for rank in group:
            bar = ("█" * round(WIDEST * last[rank] / most)).ljust(WIDEST)
            lines.append(f"rank {rank:<3} {bar} {last[rank]:>14,.0f}  {last[rank] / mean:.2f} x mean")
    lines.append(f"The busiest rank has {work.imbalance:.2f} x the mean: the others wait for it.")
    return "\n".join(lines)


def work_svg(work: AttentionWork, width: int = 960) -> str:
    """Draw a bar per rank, and a line at the mean of the ranks that share its sequences.

    Args:
        work: what to draw.
        width: in pixels.
    """
    last, most = work.by_rank, max(*work.by_rank, 1.0)
    left, wide = MARGIN + LABEL, width - 2 * MARGIN - LABEL - NUMBERS
    parts, y = [], TOP
    for group in work.groups:
        mean = sum(last[rank] for rank in group) / len(group) or 1.0
        for rank in group:
            share = last[rank] / mean
            parts.append(
                f'<text class="words" x="{left - 8:g}" y="{y + 12:g}" text-anchor="end">rank {rank}</text>'
                f'<rect fill="{ink_of("cp")}" x="{left:g}" y="{y:g}" width="{wide * last[rank] / most:.1f}" '
                f'height="{TALL:g}"><title>rank {rank}: {last[rank]:,.0f} pairs, {share:.2f} x mean</title></rect>'
                f'<text class="faint" x="{left + wide * last[rank] / most + 8:.1f}" y="{y + 12:g}">{last[rank]:,.0f}, '
                f"{share:.2f} x mean</text>"
            )
            y += TALL + 4
        at = left + wide * mean / most
        top = y - (TALL + 4) * len(group)
        parts.append(f'<path class="line" d="M{at:.1f} {top:g}V{y:g}" stroke-dasharray="4 3" fill="none"/>')
        y += GAP
    step = work.first + len(work.pairs) - 1
    title = f"Attention by rank in step {step}"
    note = (
        "pairs of a query and a key, in all heads and layers; dashed: the mean of ranks that share sequences"
    )
    return sheet("attention", title, str(work), parts, width, y - 2, head=title, foot=note)
