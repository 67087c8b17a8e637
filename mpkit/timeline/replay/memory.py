"""What lies beside a rank's spans on the virtual clock: its memory, samples of its GPU, parts of its all-to-alls."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.replay.program import RankProgram
from mpkit.timeline.replay.spans import DEVICE_SAMPLE, HELD, PART_SENT, NameLines
from mpkit.trace import CATEGORIES, Kind, Lane

Array = npt.NDArray[Any]


def read_sent_parts(rank: int, parts: Array, ops: Array, lines: NameLines) -> Array:
    """Return (n,) of `PART_SENT`: (n,) of `SENT_PART` without those of ops that are not complete."""
    parts = parts[parts["op"] < len(ops)]
    parts = parts[ops["end"][parts["op"]] != 0]
    of = ops[parts["op"]]
    found = np.zeros(len(parts), PART_SENT)
    found["rank"], found["step"], found["group"] = rank, of["step"], lines[of["group"]]
    found["member"], found["bytes"] = parts["member"], parts["bytes"]
    return found


def measured_samples(rank: int, samples: Array, origin: int) -> Array:
    """Return (n,) of `DEVICE_SAMPLE` on the wall clock: (n,) of `SAMPLE`, without those before the first op."""
    return _sample_at(rank, samples, (samples["time"] - origin) * 1e-9)


def placed_samples(rank: int, samples: Array, ops: Array, spans: Array) -> Array:
    """Return (n,) of `DEVICE_SAMPLE` on the clock of a replay: between the same moments of work as on the wall clock.

    A sample before the rank's first operation, or after its last one so far, has no place and is left out.

    Args:
        rank: the rank whose GPU was sampled.
        samples: (m,) of `SAMPLE`.
        ops, spans: (k,) of `OP` and of `SPAN`: each operation on the wall clock, and where the replay has put it.
    """
    if not len(samples):
        return np.zeros(0, DEVICE_SAMPLE)
    works = (ops["lane"] == Lane.COMPUTE) & (ops["end"] > 0)
    ops, spans = ops[works], spans[works]
    wall = np.concatenate([ops["start"], ops["end"]])
    order = np.argsort(wall, kind="stable")
    wall = wall[order]
    clock = np.maximum.accumulate(np.concatenate([spans["start"], spans["end"]])[order])
    if not len(wall):
        return np.zeros(0, DEVICE_SAMPLE)
    there = samples[(samples["time"] >= wall[0]) & (samples["time"] <= wall[-1])]
    return _sample_at(rank, there, np.interp(there["time"] - wall[0], wall - wall[0], clock))


def _sample_at(rank: int, samples: Array, time: Array) -> Array:
    placed = np.zeros(len(samples), DEVICE_SAMPLE)
    for name in DEVICE_SAMPLE.names or ():
        if name not in ("time", "rank"):
            placed[name] = samples[name]
    placed["time"], placed["rank"] = time, rank
    return placed[time >= 0]


class HeldMemory:
    """What a rank holds in each category over time.

    A change belongs to the op that began last before it. Its time lies within that op, or between it and the next
    one, as it did on the wall clock.
    """

    def __init__(self) -> None:
        self._totals = np.zeros(len(CATEGORIES), np.int64)
        self._time = 0.0

    def place(self, rank: int, program: RankProgram, memory: Array) -> Array:
        """Return (n,) of `HELD` for (n,) of `MEMORY`, the next changes."""
        held = np.zeros(len(memory), HELD)
        if not len(memory):
            return held
        time = np.maximum.accumulate(np.maximum(self._times_of(program, memory), self._time))
        held["time"], held["rank"], held["category"] = time, rank, memory["category"]
        for category in range(len(CATEGORIES)):
            mine = memory["category"] == category
            totals = self._totals[category] + np.cumsum(memory["delta"][mine])
            held["total"][mine] = totals
            if len(totals):
                self._totals[category] = totals[-1]
        self._time = float(time[-1])
        return held

    @staticmethod
    def _times_of(program: RankProgram, memory: Array) -> Array:
        if not program.count:
            return np.zeros(len(memory))
        ops, work, done = program.ops, program.work, program.done
        op = memory["op"].astype(np.int64) - 1  # -1: before the first op, and so before any work
        last = np.clip(op, 0, program.count - 1)
        wall = memory["time"]
        begin, end = ops["start"][last], ops["end"][last]
        following = np.minimum(last + 1, program.count - 1)
        has_next = last + 1 < program.count
        next_begin = np.where(has_next, ops["start"][following], end)
        next_work = np.where(has_next, work[following], done[last])
        # Communication and steps overlap with what follows; nothing is "after" them.
        kind = ops["kind"][last]
        has_end = (kind < Kind.SEND) | ((kind >= Kind.COPY_TO_DEVICE) & (kind < Kind.STEP))
        within = has_end & (wall < end)
        # Either between the op's start and its end, or between its end and the next op's start.
        after = has_end & ~within
        share = _share(wall, np.where(after, end, begin), np.where(within, end, next_begin))
        low = np.where(after, done[last], work[last])
        high = np.where(within, done[last], next_work)
        at = np.where(op < 0, 0.0, low + share * (high - low))
        # A wait delays what comes after it; what happened while waiting is put where the wait begins.
        waits = np.where(within & (kind == Kind.WAIT), last, last + 1)
        return program.clock(at, np.where(op < 0, 0, waits))


def _share(wall: Array, low: Array, high: Array) -> Array:
    return np.clip((wall - low) / np.maximum(high - low, 1), 0.0, 1.0)  # type: ignore[no-any-return]
