"""A diagnosis: as text, and as a panel in which each finding opens and shows its operations in the timeline."""

from __future__ import annotations

from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING

from mpkit.common.display import image
from mpkit.common.safe_text import escape
from mpkit.common.units import percent, seconds
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Lane
from mpkit.views.drawing.colours import CAUSE_INKS
from mpkit.views.drawing.lanes import FOLDED
from mpkit.views.timeline import critical_path as paths
from mpkit.views.timeline.picture import Picture
from mpkit.views.timeline.svg import Plot, svg

if TYPE_CHECKING:
    from mpkit.timeline.findings import Diagnosis, Finding


PICTURES = 5
"""How many findings of a panel have a picture."""

OUTLINES = 2000
"""The most operations of a finding that are outlined."""


# ---- in words


def heading(found: Diagnosis) -> str:
    """Say which step was diagnosed and how much the findings come to."""
    ranks = found.path.timeline.world_size
    what = f"Step {found.step}" if found.step >= 0 else "The timeline"
    many = f"{len(found)} finding{'s' * (len(found) != 1)}"
    many = many if len(found) else "nothing costs 2 % of it or more"
    return f"{what} ({found.why}): {seconds(found.step_time)} on {ranks} rank{'s' * (ranks != 1)}; {many}."


def idle_time(found: Diagnosis) -> list[tuple[str, str]]:
    """Return the causes of at least a percent of idle time, and their share of the step, the largest first."""
    whole = found.step_time
    ordered = sorted(found.idle.items(), key=lambda each: -each[1])
    return [
        (cause, percent(time / whole) + " (not explained)" * (cause in found.not_explained))
        for cause, time in ordered
        if whole and time >= 0.01 * whole
    ]


def diagnosis_text(found: Diagnosis, width: int = 110) -> str:
    """Return the findings as text."""
    lines = [heading(found)]
    if causes := idle_time(found):
        lines.append(f"A rank is idle, on average: {', '.join(map(' '.join, causes))}.")
    for number, each in enumerate(found, 1):
        lines.append("")
        for label, words in (("", each.words), *_parts(found, each)):
            start = f"   {label}: " if label else f"{number}. "
            lines.append(fill(words, width, initial_indent=start, subsequent_indent="   "))
    return "\n".join(lines)


def _parts(found: Diagnosis, each: Finding) -> list[tuple[str, str]]:
    parts = [("why", each.reason), ("try", each.remedy)]
    if each.gain:
        gain = f"{seconds(each.gain)} per step, {percent(each.gain / found.step_time)}, by {each.by}"
        gain += f"; idle time: {each.idle}" if each.idle else ""
        parts.append(("gain", gain))
    return [*parts, ("check", each.check)] if each.check else parts


# ---- drawn


def diagnosis_svg(found: Diagnosis, width: int = 960) -> str:
    """Draw the step with the operations of the first finding outlined; without findings, its critical path."""
    return finding_svg(found, found[0], width) if len(found) else paths.critical_svg(found.path, width)


def finding_svg(found: Diagnosis, each: Finding, width: int = 960) -> str:
    """Draw the step with the operations of a finding outlined."""
    timeline = found.path.timeline
    assert isinstance(timeline, Timeline)
    return svg(
        timeline, width, title=each.kind.capitalize(), fold=timeline.world_size > FOLDED,
        over=lambda pic, tops, plot: _outlines(found, each, pic, tops, plot),
    )  # fmt: skip


def _outlines(found: Diagnosis, each: Finding, pic: Picture, tops: list[float], plot: Plot) -> str:
    spans, boxes = found.path.timeline.spans, []
    for row in each.ops[:OUTLINES]:
        span = spans[row]
        rank, part = int(span["rank"]), paths.PARTS.get(Lane(span["lane"]), "compute")
        boxes += paths.outline_span(pic, tops, plot, rank, part, float(span["start"]), float(span["end"]))
    outlines = paths.merge_outlines(sorted(boxes, key=lambda box: (box.y, box.x)))
    drawn = "".join(outline.svg() for outline in outlines)
    return f'<g aria-label="operations of the finding">{drawn}</g>'


def diagnosis_panel(found: Diagnosis) -> str:
    """Return the findings as HTML without scripts: each opens with the keyboard or a click."""
    parts = [f"<p><b>{escape(heading(found))}</b></p>"]
    if causes := idle_time(found):
        shares = ", ".join(
            f'<span aria-hidden="true" style="color:{CAUSE_INKS[cause]}">&#9632;</span> {cause} {share}'
            for cause, share in causes
        )
        parts.append(f"<p>A rank is idle, on average: {shares}.</p>")
    for number, each in enumerate(found, 1):
        gain = f" <b>{percent(each.gain / found.step_time)}</b>" if each.gain else ""
        items = "".join(
            f"<dt>{label}</dt><dd>{f'<code>{escape(words)}</code>' if label == 'check' else escape(words)}</dd>"
            for label, words in _parts(found, each)
        )
        drawn = partial(finding_svg, found, each)
        picture = image(drawn, f"{each.kind}: {each.words}") if number <= PICTURES else ""
        parts.append(
            f"<details{' open' * (number == 1)}><summary>{number}. {escape(each.words)}{gain}</summary>"
            f"<dl>{items}</dl>{picture}</details>"
        )
    return f'<section aria-label="diagnosis">{"".join(parts)}</section>'


def diagnosis_html(found: Diagnosis) -> str:
    """Return a page: the findings, and the critical path."""
    path = f"<h2>Critical path</h2>{paths.critical_svg(found.path)}<pre>{escape(paths.critical_text(found.path))}</pre>"
    return paths.page("Diagnosis", f"<h1>Diagnosis</h1>{diagnosis_panel(found)}{path}")
