"""The wall clock: ops when they really happened."""

from __future__ import annotations

import numpy as np

from mpkit.timeline import HELD, SPAN, Timeline
from mpkit.trace import CATEGORIES, Kind, Trace

__all__ = ["measured"]


def measured(trace: Trace) -> Timeline:
    """A trace as it was, zero being where the first op began. Ranks of one machine share a clock.

    Communication lasts from when it was asked for until it was seen to be complete: longer than its bytes
    were under way, by up to as long as the other end took to come.
    """
    names, numbers = [""], {"": 0}
    spans, held, notes = [], [], []
    origin = min((int(rank.ops["start"].min()) for rank in trace.ranks if len(rank.ops)), default=0)
    rows = 0
    for number, rank in enumerate(trace.ranks):
        for name in [*rank.names, "?"]:
            if name not in numbers:
                numbers[name] = len(names)
                names.append(name)
        lines = np.array([numbers[name] for name in [*rank.names, "?"]])
        whole = rank.ops["end"] != 0
        ops = rank.ops[whole]
        if len(ops) < len(rank.ops):
            count = len(rank.ops) - len(ops)
            are = "op open, which is" if count == 1 else "ops open, which are"
            notes.append(f"Rank {number} left {count:,} {are} not shown.")
        order = np.argsort(ops["start"], kind="stable")
        ops = ops[order]
        part = np.zeros(len(ops), SPAN)
        for column in ("lane", "kind", "depth", "stage", "microbatch", "step", "bytes", "flops", "peer"):
            part[column] = ops[column]
        part["rank"] = number
        for column in ("name", "group"):
            part[column] = lines[np.minimum(ops[column], len(lines) - 1)]
        part["start"] = part["issued"] = (ops["start"] - origin) * 1e-9
        part["end"] = np.maximum(ops["end"] - origin, ops["start"] - origin) * 1e-9
        row = np.full(len(rank.ops) + 1, -1)
        row[np.flatnonzero(whole)[order]] = rows + np.arange(len(ops))
        refers = (ops["kind"] == Kind.WAIT) & (ops["ref"] >= 0) & (ops["ref"] < len(rank.ops))
        part["cause"] = np.where(refers, row[np.where(refers, ops["ref"], -1)], -1)
        spans.append(part)
        rows += len(part)
        changes = np.zeros(len(rank.memory), HELD)
        changes["time"] = (rank.memory["time"] - origin) * 1e-9
        changes["rank"], changes["category"] = number, rank.memory["category"]
        for category in range(len(CATEGORIES)):
            mine = rank.memory["category"] == category
            changes["total"][mine] = np.cumsum(rank.memory["delta"][mine])
        held.append(changes)
    return Timeline(
        np.concatenate([np.zeros(0, SPAN), *spans]), names, np.concatenate([np.zeros(0, HELD), *held]),
        trace.world_size, "measured", dict(trace.meta), notes,
    )  # fmt: skip
