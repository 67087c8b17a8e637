"""A whole run as a strip above its last step, as the live view has it: a line per rank, with that step framed."""

from __future__ import annotations

import numpy as np

from mpkit.common.units import seconds
from mpkit.timeline import metrics
from mpkit.timeline.timeline import Timeline
from mpkit.views.drawing.colours import INKS, Key
from mpkit.views.drawing.sheet import sheet
from mpkit.views.theme import MARGIN, THEMES
from mpkit.views.timeline.coverage import coverage, runs, strongest
from mpkit.views.timeline.picture import picture
from mpkit.views.timeline.svg import gutter_of

__all__ = ["LEGIBLE", "strip_svg"]

LEGIBLE = 8
"""Steps up to which one picture shows all of them, as `seen.js` does."""

LINES, LINE, TOP = 8, 4.0, 22.0
"""The most lines of the strip; the pixels of each, and above the first."""


def strip_svg(timeline: Timeline, width: int = 960) -> str:
    """Draw a run of several steps as a strip, with a frame around its last complete step.

    Args:
        timeline: the whole run.
        width: in pixels; the axis is that of the picture of a step below it (`svg`).
    """
    pic = picture(timeline)
    last = timeline.steps[-1]
    left = MARGIN + gutter_of(pic)
    span = width - MARGIN - left
    computes = [number for number, row in enumerate(pic.rows) if row.part == "compute"]
    chosen = [
        computes[int((line + 0.5) * len(computes) / n)]
        for n in [min(len(computes), LINES)]
        for line in range(n)
    ]
    body = []
    for line, number in enumerate(chosen):
        keys, busy = strongest(coverage(pic.of_row(number), int(span), pic.duration))
        shade = np.ceil(busy * 4).astype(int)
        for first, after in runs(keys * 8 + shade):
            if keys[first] > Key.IDLE:
                body.append(
                    f'<rect class="k{int(keys[first])}" x="{left + first:g}" y="{TOP + line * LINE:g}" '
                    f'width="{after - first}" height="{LINE - 0.5:g}" opacity="{shade[first] / 4:g}"/>'
                )
    start, end = metrics.extent(metrics.active(timeline.spans[timeline.spans["step"] == last]))
    x = left + (start - pic.origin) / pic.duration * span
    wide = max((end - start) / pic.duration * span, 3.0)
    bottom = TOP + len(chosen) * LINE
    body.append(
        f'<rect class="frame" x="{x:.1f}" y="{TOP - 3:g}" width="{wide:.1f}" height="{bottom - TOP + 5:g}" rx="2"/>'
    )
    words = f"the whole run: {len(timeline.steps)} steps in {seconds(pic.duration)}; below: step {last}"
    body.append(f'<text class="faint" x="{left:g}" y="14" font-size="11">{words}</text>')
    rules = {
        name: {
            **{
                f"k{int(key)}": f"fill:{ink.light if name == 'light' else ink.dark}"
                for key, ink in INKS.items()
            },
            "frame": f"fill:none;stroke:{theme.text};stroke-width:1.6",
        }
        for name, theme in THEMES.items()
    }
    return sheet("strip", words, f"{words}.", body, width, bottom + 8, classes=rules)
