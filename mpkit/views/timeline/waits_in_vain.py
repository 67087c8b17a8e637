"""The waits of ranks that hang, or were ended while they waited: drawn to the picture's edge, with their reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpkit.common.safe_text import escape
from mpkit.timeline import metrics
from mpkit.timeline.timeline import Timeline

if TYPE_CHECKING:
    from mpkit.views.timeline.picture import Picture


VAIN = 0.25
"""How much longer a picture is in which ranks wait in vain, as a share of what came before."""


@dataclass(frozen=True)
class Wait:
    """A rank waits in vain from `start` seconds on, to the end of the picture."""

    rank: int
    start: float
    words: str


def length_with_waits(timeline: Timeline, origin: float) -> float:
    """Return how long a picture is in which ranks wait in vain: long enough to see a wait that begins last."""
    ends = metrics.active(timeline.spans)["end"]
    starts = [wait.start for wait in waits_in_vain(timeline, origin)]
    last = max(*starts, float(ends.max()) - origin if len(ends) else 0.0, 0.0)
    return last + (VAIN * last or 1e-3)


def waits_in_vain(timeline: Timeline, origin: float) -> tuple[Wait, ...]:
    """Return the waits of ranks that hung, or were ended while they waited; seconds from `origin`.

    A part of a timeline, such as a step before the hang, has none: its operations end before a rank began to wait.
    """
    waiting = timeline.meta.get("waiting", [])
    ends = metrics.active(timeline.spans)["end"]
    if len(ends) and waiting and float(ends.max()) < (1 - 1e-6) * min(each["start"] for each in waiting):
        return ()
    return tuple(Wait(each["rank"], each["start"] - origin, each["words"]) for each in waiting)


def vain_svg(pic: Picture, tops: list[float], left: float, span: float, height: float) -> str:
    """Draw the waits in vain, hatched and with a dashed outline, each with its reason."""
    scale = span / pic.duration
    rows = {row.rank: number for number, row in enumerate(pic.rows) if row.part == "compute"}
    parts = []
    for wait in pic.waits:
        if wait.rank not in rows:
            continue
        x, y = left + wait.start * scale, tops[rows[wait.rank]]
        width = left + span - x
        short = wait.words.partition(" (")[0]
        words = next((each for each in (wait.words, short) if 6.4 * len(each) + 8 < width), "")
        parts.append(
            f'<rect class="k0" x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}"/>'
            f'<rect class="path" stroke-dasharray="4 3" x="{x:.2f}" y="{y + 0.8:g}" width="{width:.2f}" '
            f'height="{height - 1.6:g}"><title>{escape(f"rank {wait.rank} {wait.words}")}</title></rect>'
        )
        if words:
            long = 6.4 * len(words) + 6
            parts.append(
                f'<rect class="ground" x="{x + 5:.2f}" y="{y + 5:g}" width="{long:.1f}" height="16" rx="3"/>'
                f'<text class="words" x="{x + 8:.2f}" y="{y + 17:g}" font-size="11">{escape(words)}</text>'
            )
    return f'<g aria-label="waits in vain">{"".join(parts)}</g>'
