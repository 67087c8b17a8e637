"""A comparison in the terminal: a table of figures with work and idle time, and where two timelines differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.units import memory_text, percent, seconds
from mpkit.timeline.idleness import CAUSES
from mpkit.timeline.notes import failure_notes

if TYPE_CHECKING:
    from mpkit.timeline.comparison import Comparison

__all__ = ["comparison_text"]

SHOWN = 6
"""The number of parts of a difference that are listed; the rest is summed."""


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as lines of text."""
    rows = comparison.rows
    width = max(len(row.name) for row in rows)
    causes = [cause for cause in CAUSES if any(row.idle[cause] > 0 for row in rows)]
    most = max(row.memory for row in rows)
    heads = ["step time", "bubble", "work", *causes, *["peak memory"] * bool(most)]
    lines = [" " * width + "  " + "  ".join(f"{head:>{max(len(head), 9)}}" for head in heads)]
    for row in rows:
        t = row.timeline
        cells = [seconds(t.step_time), percent(t.bubble), seconds(sum(row.work.values()))]
        cells += [seconds(row.idle[cause]) for cause in causes]
        cells += [memory_text(row.memory, most) if row.memory else "-"] * bool(most)
        lines.append(
            f"{row.name:<{width}}  "
            + "  ".join(f"{cell:>{max(len(head), 9)}}" for cell, head in zip(cells, heads, strict=True))
        )
    lines.append(
        "Work and idle time by cause: seconds per rank, averaged over ranks; they add up to the makespan."
    )
    for row in rows:
        lines += [f"{row.name}: {note}" for note in failure_notes(row.timeline.meta)]
    for row in rows[1:]:
        lines += ["", *_difference(comparison, row.name)]
    return "\n".join(lines)


def _difference(comparison: Comparison, name: str) -> list[str]:
    first = comparison.rows[0].name
    gap = comparison.gap(first, name)
    whole = sum(gap.values())
    base = comparison.rows[0].timeline.makespan or 1.0
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
