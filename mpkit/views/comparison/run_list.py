"""The runs of a notebook, or of a folder, as lines of text, and as a table to sort."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.common.units import memory_text, percent, seconds

if TYPE_CHECKING:
    from mpkit.launch.session.run_list import KeptRun, RunList

__all__ = ["run_list_text", "run_list_view"]

HEADS = "run", "name", "plan", "status", "steps", "step time", "bubble", "peak memory", "loss"
TITLES = (
    "counts the runs of this notebook, or the files of the folder",
    "of the file that it comes from",
    "the plan",
    "how it ended",
    "the steps that it did",
    "the median step, on the virtual clock",
    "the idle share of that step",
    "what the fullest rank held at its peak",
    "the loss of its last step",
)


def _cells(row: KeptRun, like: float) -> list[tuple[str, float | str | None]]:
    """Return what is shown of a run, each with the value that it is sorted by."""
    return [
        (str(row.number), row.number),
        (row.name, row.name or None),
        (repr(row.plan), repr(row.plan)),
        (row.status, row.status),
        (str(row.steps), row.steps),
        ("" if row.step_time is None else seconds(row.step_time), row.step_time),
        ("" if row.bubble is None else percent(row.bubble), row.bubble),
        (memory_text(row.memory, like) if row.memory else "", row.memory or None),
        ("" if row.loss is None else f"{row.loss:.4g}", row.loss),
    ]


def _most_memory(found: RunList) -> float:
    """Return the bytes of the run that held most, whose unit all rows have."""
    return max((row.memory or 0.0 for row in found), default=0.0)


def run_list_text(found: RunList) -> str:
    """Return a line per run, the oldest first."""
    if not len(found):
        return "No run has ended yet in this notebook."
    like = _most_memory(found)
    table = [list(HEADS), *([text for text, _ in _cells(row, like)] for row in found)]
    if not any(row.name for row in found):
        table = [line[:1] + line[2:] for line in table]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def run_list_view(found: RunList) -> Any:
    """Lay out a table whose heads sort it."""
    from mpkit.views.drawing.sortable import Column, SortableTable

    columns = [
        Column(head, title, number=head not in ("name", "plan", "status"))
        for head, title in zip(HEADS, TITLES, strict=True)
    ]
    rows = [_cells(row, _most_memory(found)) for row in found]
    if not any(row.name for row in found):
        columns, rows = columns[:1] + columns[2:], [row[:1] + row[2:] for row in rows]
        caption = "Runs of this notebook; mk.runs().compare(1, 2) draws two side by side"
    else:
        caption = "Runs of a folder; mk.runs(folder).compare(1, 2) draws two side by side"
    return SortableTable(caption, columns, rows)
