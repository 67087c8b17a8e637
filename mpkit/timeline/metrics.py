"""What a Timeline says in numbers, as pure functions of its spans.

Each takes the spans of one step. *Work* is what keeps the compute lane busy: outermost actions, without the layers
inside them and without waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.trace import CATEGORIES, Kind, Lane

Array = npt.NDArray[Any]


def work(spans: Array) -> Array:
    """Return the outermost actions of the compute lane."""
    outermost = (spans["lane"] == Lane.COMPUTE) & (spans["depth"] == 0)
    return np.asarray(spans[outermost & (spans["kind"] != Kind.WAIT)])


def active(spans: Array) -> Array:
    """Return outermost actions, communication and copies, which occupy a device or a link; no waits and no steps."""
    return np.asarray(spans[(spans["kind"] != Kind.WAIT) & (spans["lane"] != Lane.NONE)])


def extent(spans: Array) -> tuple[float, float]:
    """Return the first start and the last end; (0, 0) if there are no spans."""
    return (float(spans["start"].min()), float(spans["end"].max())) if len(spans) else (0.0, 0.0)


def waits_within(spans: Array) -> Array:
    """Return the waits in the middle of an action, such as for an all-reduce in a span of a learner's own."""
    return np.asarray(spans[(spans["kind"] == Kind.WAIT) & (spans["depth"] > 0)])


def work_times(mine: Array) -> Array:
    """Return the seconds of each of a rank's actions without the waits inside it."""
    actions, waits = work(mine), covered_times(waits_within(mine))
    if not len(waits):
        seconds: Array = actions["end"] - actions["start"]
        return seconds
    ends = np.cumsum(waits[:, 1] - waits[:, 0])
    waited = np.stack([ends - (waits[:, 1] - waits[:, 0]), ends], axis=1)  # before each border of a wait
    at = [
        actions[bound] - np.interp(actions[bound], waits.ravel(), waited.ravel())
        for bound in ("start", "end")
    ]
    return np.asarray(at[1] - at[0])


def busy(spans: Array, world_size: int) -> Array:
    """Return the seconds of work by rank: its actions, without the waits inside them."""
    if not len(waits_within(spans)):
        these = work(spans)
        return np.bincount(these["rank"], these["end"] - these["start"], minlength=world_size)
    return np.array([work_times(spans[spans["rank"] == rank]).sum() for rank in range(world_size)])


def covered_times(spans: Array) -> Array:
    """Return the times that at least one of the spans covers, as disjoint intervals, (k, 2)."""
    return covered(spans["start"], spans["end"])


def covered(start: Array, end: Array) -> Array:
    """Return the times that at least one interval from a start to its end covers, as disjoint intervals, (k, 2)."""
    if not len(start):
        return np.zeros((0, 2))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    begins = np.concatenate([[True], start[1:] > end[:-1]])
    last = np.concatenate([np.flatnonzero(begins)[1:] - 1, [len(start) - 1]])
    return np.stack([start[begins], end[last]], axis=1)


def length(intervals: Array) -> float:
    """Return the total length in seconds of intervals that do not overlap."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def exposed_seconds(comm: Array, compute: Array) -> float:
    """Return the seconds in which a rank communicates and does not compute; waits inside actions do not compute."""
    there, works, waits = (
        covered_times(comm),
        covered_times(work(compute)),
        covered_times(waits_within(compute)),
    )
    alone = length(there) - common(there, works)
    return alone + common(there, waits)


def common(a: Array, b: Array) -> float:
    """Return the seconds that both cover; each is (k, 2), disjoint intervals."""
    both = np.concatenate([a, b])
    return length(a) + length(b) - length(covered(both[:, 0], both[:, 1]))


def changes_within(held: Array, start: float, end: float) -> Array:
    """Return the changes between two times, after the amounts that were held at the first of them."""
    kept = held[(held["time"] > start) & (held["time"] <= end)]
    before = held[held["time"] <= start]
    # For each rank and category, keep the last change.
    key = before["rank"].astype(np.int64) * len(CATEGORIES) + before["category"]
    _, backwards = np.unique(key[::-1], return_index=True)
    levels = before[len(before) - 1 - backwards]
    levels["time"] = start
    both = np.concatenate([levels, kept])
    return both[np.lexsort((both["time"], both["rank"]))]


def levels_of(mine: Array) -> Array:
    """Return what a rank holds by category before its first change and after each, (n + 1, categories).

    Args:
        mine: (n,) of `HELD`, by time.
    """
    levels, values = (
        np.zeros((len(mine) + 1, len(CATEGORIES)), np.int64),
        np.concatenate([[0], mine["total"]]),
    )
    for category in range(len(CATEGORIES)):
        # The last total at or before each moment: a running maximum of the indices of the moments.
        latest = np.where(
            np.concatenate([[False], mine["category"] == category]), np.arange(len(mine) + 1), 0
        )
        levels[:, category] = values[np.maximum.accumulate(latest)]
    return levels
