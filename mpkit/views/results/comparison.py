"""A comparison: timelines on one axis with where their time goes, where two of them differ; and a prediction as one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpkit.common.display import image
from mpkit.common.safe_text import escape
from mpkit.common.table import table_text
from mpkit.common.units import memory_text, percent, seconds
from mpkit.timeline.idleness import CAUSES
from mpkit.timeline.notes import failure_notes
from mpkit.views.chart.svg import chart_svg
from mpkit.views.drawing.colours import CAUSE_INKS
from mpkit.views.drawing.lanes import widest_label
from mpkit.views.drawing.sheet import keys, sheet
from mpkit.views.results.steps import causes
from mpkit.views.theme import MARGIN
from mpkit.views.timeline.picture import picture
from mpkit.views.timeline.svg import gutter_of, timeline_svg

if TYPE_CHECKING:
    from mpkit.prediction.experiments.what_if import WhatIf
    from mpkit.timeline.comparison import ComparedStep, Comparison


def what_if_text(found: WhatIf) -> str:
    """Return a row for the run and for each change, and memory, as lines of text."""
    table = _steps(found.rows)
    for row, change in zip(table, ["change", "", *(_sign(value) for _, value in found.causes)], strict=True):
        row.insert(2, change)
    whole = found.step_time - found.before.step_time
    relative = whole / found.before.step_time
    lines = [
        *table_text(table),
        "Each change is on top of those above it. Steps are on the virtual clock, each rank on a device of its own.",
        AVERAGED,
        f"Predicted: {seconds(found.step_time)} per step, {_sign(whole)} ({relative:+.1%}); {_error(found)}.",
        *_memory(found),
    ]
    return "\n".join(lines)


def _sign(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def _error(found: WhatIf) -> str:
    if found.error is None:
        return "nobody has compared such a prediction with a run"
    if not found.error:
        return "a replay of the run's own operations"
    return f"predictions were within {found.error:.0%} of real runs on CPU ranks"


def _memory(found: WhatIf) -> list[str]:
    """Say what the fullest rank holds."""
    held = [("recorded by the run", found.before.memory)]
    if found.played is not None:
        held += [("the run's plan, played", found.played), ("predicted, played", found.timeline().memory)]
    lines = ["Peak memory of the fullest rank:"]
    for name, ranks in held:
        fullest = max(ranks, key=lambda rank: sum(rank.values()))
        total = sum(fullest.values())
        parts = ", ".join(f"{what} {memory_text(size, total)}" for what, size in fullest.items() if size)
        lines.append(f"  {name:<22} {memory_text(total)} ({parts})")
    if found.played is not None:
        lines.append(
            "  Played ranks count an operator's temporaries as buffers, which a run does not record."
        )
    return lines


def what_if_svg(found: WhatIf, width: int = 960) -> str:
    """Draw the run and the prediction below each other on one axis."""
    return comparison_svg(found.comparison, width)


def what_if_view(found: WhatIf) -> Any:
    """Lay out both interactive timelines on one axis, and the table below them."""
    import ipywidgets

    return ipywidgets.VBox(
        [comparison_view(found.comparison), ipywidgets.HTML(f"<pre>{escape(str(found))}</pre>")]
    )


SHOWN = 6
"""The number of parts of a difference that are listed; the rest is summed."""

AVERAGED = "Work and idle time by cause: seconds per rank, averaged over ranks; they add up to the step."


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as lines of text."""
    rows = comparison.rows
    lines = [*table_text(_steps(rows)), AVERAGED]
    for row in rows:
        lines += [f"{row.name}: {note}" for note in failure_notes(row.timeline.meta)]
    for row in rows[1:]:
        lines += ["", *_difference(comparison, row.name)]
    return "\n".join(lines)


def _steps(rows: Sequence[ComparedStep]) -> list[list[str]]:
    """Return a table with a row per step: its time, and where it goes."""
    seen = [cause for cause in CAUSES if any(row.idle[cause] > 0 for row in rows)]
    most = max(row.memory for row in rows)
    table = [["", "step time", "bubble", "work", *seen, *["peak memory"] * bool(most)]]
    for row in rows:
        t = row.timeline
        figures = seconds(t.step_time), percent(t.bubble), seconds(sum(row.work.values()))
        held = [memory_text(row.memory, most) if row.memory else "-"] * bool(most)
        table.append([row.name, *figures, *(seconds(row.idle[cause]) for cause in seen), *held])
    return table


def _difference(comparison: Comparison, name: str) -> list[str]:
    first = comparison.rows[0].name
    gap = comparison.gap(first, name)
    whole = sum(gap.values())
    base = comparison.rows[0].timeline.step_time or 1.0
    more = "longer" if whole > 0 else "shorter"
    if abs(whole) < 1e-9 * base:
        title = f"{name} takes as long as {first}"
    else:
        title = f"{name} is {seconds(abs(whole))} ({abs(whole) / base:.1%}) {more} than {first}"
    parts = sorted(
        ((what, value) for what, value in gap.items() if abs(value) > 1e-9 * base), key=lambda p: -abs(p[1])
    )
    if not parts:
        return [title + "."]
    lines = [title + (", of it" if len(parts) > 1 else ":")]
    shown = parts[:SHOWN] if len(parts) > SHOWN + 1 else parts
    rest = parts[len(shown) :]
    if rest:
        shown = [*shown, (f"{len(rest)} more", sum(value for _, value in rest))]
    width = max(len(what) for what, _ in shown)
    return lines + [
        f"    {what:<{width}}  {'+' if value > 0 else '-'}{seconds(abs(value))}" for what, value in shown
    ]


BAR, SPACE = 16.0, 44.0


def comparison_svg(comparison: Comparison, width: int = 960) -> str:
    """Draw the timelines below each other on the axis of the longest, and below each where its time goes."""
    room = max(row.timeline.step_time for row in comparison.rows)
    gutter = max(gutter_of(picture(row.timeline)) for row in comparison.rows)
    left, scale = MARGIN + gutter, (width - gutter - 2 * MARGIN) / room if room else 0.0
    parts: list[str] = []
    y = 0.0
    for row in comparison.rows:
        title = row.name + " (failed)" * bool(failure_notes(row.timeline.meta))
        drawn, tall = timeline_svg(row.timeline, width, title=title, room=room, gutter=gutter)
        parts += [drawn.replace("<svg ", f'<svg y="{y:g}" ', 1), _bar(row, left, y + tall, scale)]
        y += tall + SPACE
    seen = [cause for cause in CAUSES if any(row.idle[cause] > 0 for row in comparison.rows)]
    words = {"work": "work", **{cause: f"idle: {cause}" for cause in seen}}
    legend = keys(((f'fill="{CAUSE_INKS[what]}"', word) for what, word in words.items()), y - 4, width)
    title = " and ".join(row.name for row in comparison.rows)
    return sheet("compare", title, str(comparison), [*parts, *legend.parts], width, legend.y + 34)


def _bar(row: ComparedStep, x: float, y: float, scale: float) -> str:
    """Draw work, and idle time by cause, as one bar that is as long as the step."""
    parts = [f'<text class="faint" x="{x - 10:g}" y="{y + 12:g}" text-anchor="end">mean of ranks</text>']
    for what, value in {"work": sum(row.work.values()), **row.idle}.items():
        if value * scale > 0.3:
            parts.append(
                f'<rect fill="{CAUSE_INKS[what]}" x="{x:.2f}" y="{y:g}" width="{max(value * scale - 0.8, 0.4):.2f}" '
                f'height="{BAR:g}"><title>{escape(f"{what}: {seconds(value)}")}</title></rect>'
            )
        x += value * scale
    return f'<g aria-label="{escape(row.name)}: where the time goes">{"".join(parts)}</g>'


def comparison_view(comparison: Comparison) -> Any:
    """Lay out live timelines below each other, on the axis of the longest, and below them where the time goes."""
    import ipywidgets

    from mpkit.views.timeline.widget import TimelineView

    room = max(row.timeline.step_time for row in comparison.rows)
    widest = widest_label(row.timeline for row in comparison.rows)
    views = [TimelineView(row.timeline, title=row.name, room=room, widest=widest) for row in comparison.rows]
    bars = image(partial(chart_svg, causes(comparison)), str(comparison))
    return ipywidgets.VBox([*views, ipywidgets.HTML(bars)])
