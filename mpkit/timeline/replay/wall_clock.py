"""The wall clock: ops at the times at which they really happened."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.replay.memory import measured_samples, read_sent_parts
from mpkit.timeline.replay.spans import (
    DEVICE_SAMPLE,
    HELD,
    PART_SENT,
    SPAN,
    NameLines,
    Names,
    ReplayResult,
    spans_of,
)
from mpkit.trace import CATEGORIES, Kind, RankTrace, Trace

__all__ = ["as_measured"]

Array = npt.NDArray[Any]


def as_measured(trace: Trace) -> ReplayResult:
    """Return a trace as it was measured, with time 0 where the first op began. Ranks of one machine share a clock.

    Communication lasts from when it was issued until it was seen to be complete: longer than its bytes were under
    way, by up to as long as the other end was late.
    """
    names = Names()
    spans, held, notes = [np.zeros(0, SPAN)], [np.zeros(0, HELD)], []
    sent = [np.zeros(0, PART_SENT)]
    origin = min((int(rank.ops["start"].min()) for rank in trace.ranks if len(rank.ops)), default=0)
    for number, rank in enumerate(trace.ranks):
        still_open = int((rank.ops["end"] == 0).sum())
        if still_open:
            are = "op open, which is" if still_open == 1 else "ops open, which are"
            notes.append(f"Rank {number} left {still_open:,} {are} not shown.")
        lines = NameLines(names)
        lines.extend(rank.names)
        spans.append(_spans(number, rank, lines, origin, row=sum(map(len, spans))))
        held.append(_held_changes(number, rank, origin))
        sent.append(read_sent_parts(number, rank.sent_parts, rank.ops, lines))
    meta = dict(trace.meta)
    samples = [measured_samples(number, rank.samples, origin) for number, rank in enumerate(trace.ranks)]
    return ReplayResult(
        np.concatenate(spans), names.all, np.concatenate(held), trace.world_size, "measured", meta, notes,
        device_samples=np.concatenate([np.zeros(0, DEVICE_SAMPLE), *samples]), sent_parts=np.concatenate(sent),
    )  # fmt: skip


def _spans(number: int, rank: RankTrace, lines: NameLines, origin: int, row: int) -> Array:
    """Return a rank's spans by start; `row` is the timeline's row of the first one."""
    whole = np.flatnonzero(rank.ops["end"] != 0)
    order = whole[np.argsort(rank.ops["start"][whole], kind="stable")]
    ops = rank.ops[order]
    spans = spans_of(number, ops, lines)
    spans["start"] = spans["issued"] = (ops["start"] - origin) * 1e-9
    spans["end"] = (np.maximum(ops["end"], ops["start"]) - origin) * 1e-9
    rows = np.full(len(rank.ops) + 1, -1)
    rows[order] = row + np.arange(len(ops))
    refers = (ops["kind"] == Kind.WAIT) & (ops["ref"] >= 0) & (ops["ref"] < len(rank.ops))
    spans["cause"] = rows[np.where(refers, ops["ref"], -1)]
    return spans


def _held_changes(number: int, rank: RankTrace, origin: int) -> Array:
    changes = np.zeros(len(rank.memory), HELD)
    changes["time"] = (rank.memory["time"] - origin) * 1e-9
    changes["rank"], changes["category"] = number, rank.memory["category"]
    for category in range(len(CATEGORIES)):
        mine = rank.memory["category"] == category
        changes["total"][mine] = np.cumsum(rank.memory["delta"][mine])
    return changes
