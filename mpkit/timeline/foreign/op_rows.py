"""Ops of a profiled rank in the making, and how they are written as the records of a Trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.timeline.foreign.reading.events import Events
from mpkit.trace import CATEGORIES, MEMORY, OP, SENT_PART, Kind, RankTrace, lane_of

__all__ = ["OpRow", "write_rank"]

Array = npt.NDArray[Any]


class OpRow(NamedTuple):
    """An op in the making; `ref` is the row of the communication that a wait is for, `parts` what it sends to each."""

    start: int
    end: int
    kind: Kind
    depth: int = 0
    step: int = -1
    stage: int = -1
    microbatch: int = -1
    name: str = ""
    group: str = ""
    number: int = -1
    peer: int = -1
    nbytes: int = 0
    busy: int = 0
    ref: int = -1
    still: float = 0.0
    parts: tuple[int, ...] = ()


def write_rank(events: Events, rows: Sequence[OpRow], shift: int) -> RankTrace:
    """Return the records of a rank's ops, by start, and of its memory; `shift` ns are added to all times."""

    def first(at: int) -> tuple[int, bool, bool, int, int]:
        row = rows[at]
        return row.start, row.kind != Kind.STEP, row.kind == Kind.WAIT, row.depth, -row.end

    order = sorted(range(len(rows)), key=first)
    names: dict[str, int] = {"": 0}
    ops = np.zeros(len(rows), OP)
    at = {row: number for number, row in enumerate(order)}
    for number, i in enumerate(order):
        row = rows[i]
        start, end = row.start + shift, max(row.end, row.start) + shift
        ref = at[row.ref] if row.ref >= 0 else -1
        ops[number] = (
            row.kind, lane_of(row.kind), row.depth, 0, row.stage, 0, row.microbatch, row.step,
            names.setdefault(row.name, len(names)), 0, names.setdefault(row.group, len(names)), row.number, row.peer,
            ref if ref < number else -1, start, end, row.busy, row.nbytes, 0.0,
            np.nan if row.kind == Kind.STEP else row.still,
        )  # fmt: skip
    parts = [
        (number, member, nbytes)
        for number, i in enumerate(order)
        for member, nbytes in enumerate(rows[i].parts)
        if nbytes
    ]
    sent = np.array(parts, SENT_PART)
    return RankTrace(ops, _memory(events, ops, shift), list(names), sent_parts=sent)


def _memory(events: Events, ops: Array, shift: int) -> Array:
    """Return the allocator's events, those of the accelerator if it has any; nothing tells what the memory is for."""
    kinds = events.memory[:, 2].astype(
        np.int64
    )  # c10::DeviceType: 0 is the host, 1 CUDA, 6 HIP, 12 XPU, 19 MTIA
    if events.on_device and not (kinds > 0).any():  # of the host only: nothing is known of the GPU's memory
        kinds = kinds[:0]
    away = kinds[kinds > 0]
    changes = events.memory[: len(kinds)][kinds == (np.bincount(away).argmax() if len(away) else 0)]
    changes = changes[np.argsort(changes[:, 0], kind="stable")]
    memory = np.zeros(len(changes), MEMORY)
    memory["time"], memory["delta"] = changes[:, 0] + shift, changes[:, 1]
    memory["op"] = np.searchsorted(ops["start"], memory["time"], side="right")
    memory["category"] = CATEGORIES.index("buffers")
    if len(changes) and changes[0, 3] >= 0:  # what was held already
        memory["delta"][0] = changes[0, 3]
    return memory
