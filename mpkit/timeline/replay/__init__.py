"""Replay: a Trace on a clock.

program     one rank's ops on the axis of its own work, and from there on the clock
network     which ranks have issued which communication, and when the links serve it
core        Replay: ranks and network, as records arrive
memory      what each rank holds, what its GPU was doing, and what its all-to-alls sent to whom, on that clock
spans       operations with their times; ReplayResult
costs       how long ops take on the chosen machine

`as_measured` puts a Trace on the wall clock instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.devices.hardware import Hardware
from mpkit.timeline.replay.core import Replay
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
)  # fmt: skip
from mpkit.trace import CATEGORIES, TIMED_BY_EVENTS, Kind, RankTrace, Trace

__all__ = ["DEVICE_SAMPLE", "HELD", "SPAN", "Replay", "ReplayResult", "replay"]

Array = npt.NDArray[Any]


def replay(trace: Trace, hardware: Hardware | str | None = None, clock: str | None = None) -> ReplayResult:
    """Put a trace on a clock.

    Args:
        trace: what each rank did.
        hardware: a name of `mpkit.devices.catalogue()` or a `Hardware`; None: the machine of the run.
        clock: "virtual": each rank on a device of its own; "measured": the wall clock. None: measured if each rank
            had a GPU and the hardware is the run's own, else virtual.

    Raises:
        ValueError: there is no such clock or hardware, or the wall clock is asked for on other hardware.
        TraceError: a record says something that no run can record.
    """
    if clock not in (None, "virtual", "measured"):
        raise ValueError(f"clock={clock!r}: there are clock='virtual' and clock='measured'")
    if clock == "measured" and hardware is not None:
        raise ValueError(
            f"clock='measured' with hardware={hardware!r}: the wall clock was that of the run's own machine. For other "
            "hardware leave the clock out; for the wall clock leave the hardware out."
        )
    trace.check()
    if clock is None:
        clock = "measured" if hardware is None and trace.meta.get("device") in TIMED_BY_EVENTS else "virtual"
    if clock == "measured":
        return as_measured(trace)
    replaying = Replay(trace.world_size, hardware, meta=trace.meta)
    for rank, recorded in enumerate(trace.ranks):
        elsewhere = hardware is not None  # other devices would have been busy otherwise
        replaying.feed(rank, replace(recorded, samples=recorded.samples[:0]) if elsewhere else recorded)
    replaying.finish()
    return replaying.collect()


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
