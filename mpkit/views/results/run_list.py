"""The runs of a notebook, or of a folder, as a table: lines of text, or HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.common.table import table_html, table_text
from mpkit.common.units import memory_text, percent, seconds

if TYPE_CHECKING:
    from mpkit.launch.session.run_list import KeptRun, RunList

__all__ = ["run_list_text", "run_list_view"]

HEADS = ["run", "name", "plan", "status", "steps", "step time", "bubble", "peak memory", "loss"]
WORDS = (0, 1, 2, 3)
"""The columns that are no numbers to compare."""


def _rows(found: RunList) -> list[list[str]]:
    """Return the heads and a row per run, the oldest first; the column of names is there if any run has one."""
    most = max((row.memory or 0.0 for row in found), default=0.0)
    rows = [HEADS, *(_cells(row, most) for row in found)]
    return rows if any(row.name for row in found) else [row[:1] + row[2:] for row in rows]


def _cells(row: KeptRun, like: float) -> list[str]:
    return [
        str(row.number),
        row.name,
        repr(row.plan),
        row.status,
        str(row.steps),
        "" if row.step_time is None else seconds(row.step_time),
        "" if row.bubble is None else percent(row.bubble),
        memory_text(row.memory, like) if row.memory else "",
        "" if row.loss is None else f"{row.loss:.4g}",
    ]


def run_list_text(found: RunList) -> str:
    """Return a line per run, the oldest first."""
    if not len(found):
        return "No run has ended yet in this notebook."
    return "\n".join(table_text(_rows(found), WORDS))


def run_list_view(found: RunList) -> Any:
    """Return the same as an HTML table, which says how two runs are compared."""
    from IPython.display import HTML

    where = "a folder; mk.runs(folder)" if any(row.name for row in found) else "this notebook; mk.runs()"
    caption = f"Runs of {where}.compare(1, 2) draws two side by side, .to_dataframe() sorts them"
    return HTML(table_html(_rows(found), WORDS, caption))
