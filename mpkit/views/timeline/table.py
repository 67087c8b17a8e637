"""The figures of a timeline as a table, one line per rank: for screen readers, and for readers who want numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpkit.common.units import bytes_text, percent, seconds
from mpkit.timeline import metrics
from mpkit.timeline.timeline import Timeline
from mpkit.views.drawing.colours import INKS, Key, key_of
from mpkit.views.drawing.lanes import rank_label
from mpkit.views.memory.series import held_text

__all__ = ["rank_table"]


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
    whole, idle = timeline.step_time, timeline.idle
    head = ["", "idle", *(INKS[key].word for key in shown)]
    data = timeline.data_time
    head += ["data loading"] * any(data)
    head += (
        ["exposed communication"] * any(exposed) + ["bytes sent"] * any(sent) + ["peak memory"] * any(peak)
    )
    rows = []
    for rank in range(timeline.world_size):
        mine = work["rank"] == rank
        row = [rank_label(timeline, rank), percent(idle[rank] / whole if whole else 0.0)]
        row += [seconds(float(length[mine & (keys == key)].sum())) for key in shown]
        row += [seconds(data[rank])] * any(data)
        row += [seconds(exposed[rank])] * any(exposed) + [bytes_text(sent[rank])] * any(sent)
        rows.append(row + [held_text(timeline, peak[rank], max(like, *peak))] * any(peak))
    return {"head": head, "rows": rows}
