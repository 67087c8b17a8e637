"""What a Timeline says in numbers, as pure functions of its spans.

Each takes the spans of one step. *Work* is what keeps the compute lane busy: outermost actions, without the layers
inside them and without waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.trace import CATEGORIES, Kind, Lane

__all__ = [
    "active",
    "busy",
    "bytes_by_kind",
    "changes_within",
    "common",
    "covered",
    "covered_times",
    "exposed_seconds",
    "extent",
    "extents",
    "length",
    "peak",
    "steps",
    "work",
]

Array = npt.NDArray[Any]


def work(spans: Array) -> Array:
    """Return the outermost actions of the compute lane."""
    of_lane: Array = spans[
        (spans["lane"] == Lane.COMPUTE) & (spans["depth"] == 0) & (spans["kind"] != Kind.WAIT)
    ]
    return of_lane


def steps(spans: Array, world_size: int) -> list[int]:
    """List the steps that every rank completed, in order."""
    marks = spans[spans["kind"] == Kind.STEP]
    both = np.unique(marks["step"].astype(np.int64) * world_size + marks["rank"])
    numbers, ranks = np.unique(both // max(world_size, 1), return_counts=True)
    return [int(n) for n in numbers[ranks == world_size]]


def active(spans: Array) -> Array:
    """Return outermost actions, communication and copies, which occupy a device or a link; no waits and no steps."""
    waits = (spans["kind"] == Kind.WAIT) | (spans["lane"] == Lane.NONE)
    these: Array = spans[~waits]
    return these


def extent(spans: Array) -> tuple[float, float]:
    """Return the first start and the last end; (0, 0) if there are no spans."""
    return (float(spans["start"].min()), float(spans["end"].max())) if len(spans) else (0.0, 0.0)


def waits_within(spans: Array) -> Array:
    """Return the waits in the middle of an action, such as for an all-reduce in a span of a learner's own."""
    within: Array = spans[(spans["kind"] == Kind.WAIT) & (spans["depth"] > 0)]
    return within


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


def extents(spans: Array, world_size: int) -> list[tuple[float, float]]:
    """Return from when to when each rank worked; for a rank without spans, from when to when the others did."""
    mine = (spans[spans["rank"] == rank] for rank in range(world_size))
    return [extent(own if len(own) else spans) for own in mine]


def peak(held: Array, when: Sequence[tuple[float, float]]) -> list[dict[str, int]]:
    """Return the most that each rank held between two times of its own: of each category, and of all together as
    "total".

    The times differ by rank, since a rank that is done with a step may gather weights while another is still busy.

    Categories peak at different moments (activations when the forwards end, gradients when the backwards do), so
    their peaks may sum to more than the total's.
    """
    return [
        {
            **dict(zip(CATEGORIES, levels.max(axis=0).tolist(), strict=True)),
            "total": int(levels.sum(axis=1).max()),
        }
        for levels in _levels(held, when)
    ]


def held_at_peak(held: Array, when: Sequence[tuple[float, float]]) -> list[dict[str, int]]:
    """Return what each rank held by category at the moment, between two times of its own, when it held most."""
    return [
        dict(zip(CATEGORIES, levels[int(levels.sum(axis=1).argmax())].tolist(), strict=True))
        for levels in _levels(held, when)
    ]


def _levels(held: Array, when: Sequence[tuple[float, float]]) -> Iterator[Array]:
    """Yield by rank the bytes held after each change between two times, beginning with those before the first."""
    for rank, (start, end) in enumerate(when):
        mine = held[(held["rank"] == rank) & (held["time"] <= end)]
        levels = np.zeros((len(mine) + 1, len(CATEGORIES)), np.int64)
        for category in range(len(CATEGORIES)):
            at = np.flatnonzero(mine["category"] == category) + 1
            index = np.zeros(len(mine) + 1, np.int64)
            index[at] = at
            values = np.concatenate([[0], mine["total"]])
            index = np.maximum.accumulate(index)
            levels[:, category] = np.where(index > 0, values[index], 0)
        yield levels[int(np.searchsorted(mine["time"], start, side="left")) :]


def bytes_by_kind(spans: Array, world_size: int) -> list[dict[str, int]]:
    """Return each rank's payload bytes by kind of communication."""
    by_rank: list[dict[str, int]] = [{} for _ in range(world_size)]
    comm = spans[spans["lane"] == Lane.COMM]
    for rank, kind in {*zip(comm["rank"].tolist(), comm["kind"].tolist(), strict=True)}:
        mine = (comm["rank"] == rank) & (comm["kind"] == kind)
        by_rank[rank][Kind(kind).word] = int(comm["bytes"][mine].sum())
    return [dict(sorted(kinds.items())) for kinds in by_rank]
