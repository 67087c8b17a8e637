"""The figures of a timeline as a table, one line per rank: for screen readers, and for readers who want numbers.

A breakdown is one too: seconds and shares of idle time, computation and the rest, by rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.units import bytes_text, percent, seconds
from mpkit.timeline import metrics
from mpkit.timeline.timeline import Timeline
from mpkit.views.drawing.colours import INKS, Key, key_of
from mpkit.views.drawing.lanes import rank_label
from mpkit.views.memory.series import held_text

if TYPE_CHECKING:
    from mpkit.timeline.breakdown import Breakdown

__all__ = ["breakdown_html", "breakdown_text", "rank_table"]


def rank_table(timeline: Timeline, like: float = 0) -> dict[str, Any]:
    """Return {"head": [...], "rows": [[...], ...]}, all text: the figures of the last complete step, by rank.

    Args:
        timeline: whose figures.
        like: the largest amount of memory shown beside the table, whose unit it has too; 0: its own largest.

    >>> import mpkit as mk
    >>> table = rank_table(mk.simulate(mk.Plan.gpipe(2, 2)))
    >>> table["head"], table["rows"][0]
    (['', 'idle', 'forward', 'backward', 'peak memory'], ['GPU 0', '33.3 %', '2.00 s', '4.00 s', '2 micro-batches'])
    """
    steps = timeline.steps
    spans = timeline.spans[timeline.spans["step"] == steps[-1]] if steps else timeline.spans
    work = metrics.work(spans)
    keys = key_of(work["kind"])
    shown = [key for key in Key if np.any(keys == key)]
    length = work["end"] - work["start"]
    sent = [sum(kinds.values()) - kinds.get("recv", 0) for kinds in timeline.comm_bytes]
    exposed, peak = timeline.exposed_comm, [held["total"] for held in timeline.peak_memory]
    makespan, idle = timeline.makespan, timeline.idle
    head = ["", "idle", *(INKS[key].word for key in shown)]
    data = timeline.data_time
    head += ["data loading"] * any(data)
    head += (
        ["exposed communication"] * any(exposed) + ["bytes sent"] * any(sent) + ["peak memory"] * any(peak)
    )
    rows = []
    for rank in range(timeline.world_size):
        mine = work["rank"] == rank
        row = [rank_label(timeline, rank), percent(idle[rank] / makespan if makespan else 0.0)]
        row += [seconds(float(length[mine & (keys == key)].sum())) for key in shown]
        row += [seconds(data[rank])] * any(data)
        row += [seconds(exposed[rank])] * any(exposed) + [bytes_text(sent[rank])] * any(sent)
        rows.append(row + [held_text(timeline, peak[rank], max(like, *peak))] * any(peak))
    return {"head": head, "rows": rows}


HEADS = ("rank", "total", "compute", "other", "idle", "overlap")


def _rows(found: Breakdown) -> list[tuple[str, ...]]:
    rows = []
    for rank, total in enumerate(found.total.tolist()):
        parts = (float(part[rank]) for part in (found.compute, found.other, found.idle))
        shares = (f"{seconds(part)} ({percent(part / total if total else 0.0)})" for part in parts)
        rows.append(
            (
                found.numbers[rank] if found.numbers else str(rank),
                seconds(total),
                *shares,
                percent(float(found.overlap[rank])),
            )
        )
    return rows


def breakdown_text(found: Breakdown) -> str:
    """Return a line per rank."""
    rows = [HEADS, *_rows(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def breakdown_html(found: Breakdown) -> str:
    """Return the same as an HTML table."""
    head = "".join(f"<th scope='col'>{name}</th>" for name in HEADS)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in _rows(found))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
