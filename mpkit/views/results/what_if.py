"""A prediction of `Run.what_if`: the table of its changes, and both timelines on one axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpkit.common.safe_text import escape
from mpkit.common.table import table_text
from mpkit.common.units import memory_text, percent, seconds
from mpkit.views.results.comparison import comparison_svg, comparison_view

if TYPE_CHECKING:
    from mpkit.prediction.what_if_result import PredictedStep, WhatIf

__all__ = ["what_if_svg", "what_if_text", "what_if_view"]

HEADS = "step time", "change", "compute", "exposed", "idle", "bubble"


def what_if_text(found: WhatIf) -> str:
    """Return a row for the run and for each change, and memory, as lines of text."""
    names = ["the run", *(row.change for row in found.rows[1:])]
    table = [["", *HEADS]]
    for number, (name, row) in enumerate(zip(names, found.rows, strict=True)):
        change = row.step_time - found.rows[number - 1].step_time if number else None
        table.append([name, *_cells(row, change)])
    lines = table_text(table)
    whole = found.step_time - found.before.step_time
    relative = whole / found.before.step_time
    lines += [
        "Each change is on top of those above it. Compute, exposed communication and idle time are averaged over",
        "ranks and sum to the step time, which is on the virtual clock: each rank on a device of its own.",
        f"Predicted: {seconds(found.step_time)} per step, {_sign(whole)} ({relative:+.1%}); {_error(found)}.",
        *_memory(found),
    ]
    return "\n".join(lines)


def _cells(row: PredictedStep, change: float | None) -> list[str]:
    return [
        seconds(row.step_time),
        "" if change is None else _sign(change),
        seconds(row.compute),
        seconds(row.exposed_communication),
        seconds(max(0.0, row.idle)),
        percent(row.timeline.bubble),
    ]


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
