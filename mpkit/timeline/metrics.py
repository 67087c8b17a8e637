"""A Timeline's numbers: pure functions of spans, and `Figures` of the last step that all ranks completed.

Functions take the spans of one step. *Work* is what keeps the compute lane busy: outermost actions, without the layers
inside them and without waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.trace import CATEGORIES, Kind, Lane

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


def work(spans: Array) -> Array:
    """Return the outermost actions of the compute lane."""
    outermost = (spans["lane"] == Lane.COMPUTE) & (spans["depth"] == 0)
    return np.asarray(spans[outermost & (spans["kind"] != Kind.WAIT)])


def active(spans: Array) -> Array:
    """Return actions, layers, communication and copies; no waits and no steps."""
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
    bounds = (actions[name] for name in ("start", "end"))
    start, end = (times - np.interp(times, waits.ravel(), waited.ravel()) for times in bounds)
    return np.asarray(end - start)


def busy(spans: Array, world_size: int) -> Array:
    """Return the seconds of work by rank: its actions, without the waits inside them."""
    if not len(waits_within(spans)):
        these = work(spans)
        return np.bincount(these["rank"], these["end"] - these["start"], minlength=world_size)
    return np.array([work_times(spans[spans["rank"] == rank]).sum() for rank in range(world_size)])


def covered_times(spans: Array) -> Array:
    """Return the times that spans cover, as disjoint intervals, (k, 2)."""
    return covered(spans["start"], spans["end"])


def covered(start: Array, end: Array) -> Array:
    """Return the times that the intervals from start to end cover, as disjoint intervals, (k, 2)."""
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
    there = covered_times(comm)
    works, waits = covered_times(work(compute)), covered_times(waits_within(compute))
    return length(there) - common(there, works) + common(there, waits)


def common(a: Array, b: Array) -> float:
    """Return the seconds that both cover; each is (k, 2), disjoint intervals."""
    both = np.concatenate([a, b])
    return length(a) + length(b) - length(covered(both[:, 0], both[:, 1]))


def changes_within(held: Array, start: float, end: float) -> Array:
    """Return the changes between two times, preceded by the amounts held at the first of them."""
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

    `mine` is its (n,) of `HELD`, by time.
    """
    levels = np.zeros((len(mine) + 1, len(CATEGORIES)), np.int64)
    values = np.concatenate([[0], mine["total"]])
    for category in range(len(CATEGORIES)):
        # The last total at or before each moment: a running maximum of the indices of the moments.
        changes = np.concatenate([[False], mine["category"] == category])
        levels[:, category] = values[np.maximum.accumulate(np.where(changes, np.arange(len(values)), 0))]
    return levels


def stage_times(timeline: Timeline) -> dict[str, Any]:
    """Return the mean times of a timeline's actions, by stage; see `Timeline.stage_times`."""
    spans = timeline.spans
    later = spans["step"] > spans["step"].min(initial=0)
    if later.any() and len(timeline.steps) > 1:
        spans = spans[later]
    whole = spans[(spans["lane"] == Lane.COMPUTE) & (spans["depth"] == 0) & (spans["stage"] >= 0)]
    stages = int(whole["stage"].max(initial=-1)) + 1
    forward, i, w, b = (
        _means(whole[whole["kind"] == kind], stages)
        for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.BACKWARD)
    )
    if not stages or np.isnan(forward).any():
        raise ValueError(
            f"{timeline!r}.stage_times(): not every stage's forward was seen. Take it of a finished pipeline, such as "
            'cluster.train(..., mk.Plan.pipeline("1f1b", 4, 8), ...).wait()'
        )
    times = {
        "forward": forward.tolist(),
        "input_grad": np.where(np.isnan(i), b / 2, i).tolist(),
        "weight_grad": np.where(np.isnan(w), b / 2, w).tolist(),
        "hop": _hop(timeline, spans),
    }
    # Some backwards of a stage were split and some not: the latter take less than I + W.
    if not np.isnan(i + b).all():
        times["backward"] = np.where(np.isnan(b), i + w, b).tolist()
    return times


def _means(spans: Array, stages: int) -> Array:
    """Return the mean length by stage; nan for a stage without spans."""
    count = np.bincount(spans["stage"], minlength=stages)
    total = np.bincount(spans["stage"], spans["end"] - spans["start"], minlength=stages)
    means: Array = np.divide(total, count, out=np.full(stages, np.nan), where=count > 0)
    return means


def _hop(timeline: Timeline, spans: Array) -> float:
    """Return the mean time of a message with outputs or gradients (F or B in its tag); 0 if there are none."""
    received = spans[spans["kind"] == Kind.RECV]
    tags = [timeline.names[group].partition("#")[2] for group in received["group"]]
    these = received[[tag[:1] in ("F", "B") for tag in tags]] if tags else received
    return float((these["end"] - these["start"]).mean()) if len(these) else 0.0


class Figures:
    """The figures of a timeline, as a mixin of `Timeline`."""

    spans: Array
    held: Array
    world_size: int
    meta: dict[str, Any]

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that all ranks completed, ascending."""
        marks = self.spans[self.spans["kind"] == Kind.STEP]
        numbers, ranks = np.unique(np.unique(marks[["step", "rank"]])["step"], return_counts=True)
        complete: list[int] = numbers[ranks == self.world_size].tolist()
        return complete

    @cached_property
    def _last(self) -> Array:
        """The spans of the last complete step; all spans if there are no steps."""
        steps = self.steps
        return self.spans[self.spans["step"] == steps[-1]] if steps else self.spans

    @cached_property
    def step_time(self) -> float:
        """Seconds from the start of the step's first action, load, message or copy to the end of its last, over all
        ranks; a bubble is a fraction of it.

        While a rank waits for the step's first message and others finish the previous step, it is not in this step yet.
        """
        start, end = extent(active(self._last))
        return end - start

    @property
    def busy(self) -> list[float]:
        """Seconds of work, per rank."""
        return [float(b) for b in busy(self._last, self.world_size)]

    @property
    def idle(self) -> list[float]:
        """Seconds of the step without work, per rank."""
        return [self.step_time - busy for busy in self.busy]

    @property
    def utilisation(self) -> list[float]:
        """The fraction of the step that each rank works."""
        return [busy / self.step_time if self.step_time else 0.0 for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The idle fraction of the step, averaged over ranks; 0 if no rank computes.

        This is GPipe's definition (Huang et al. 2019, section 2.3), by which p stages and m micro-batches have a bubble
        of (p-1)/(m+p-1). Megatron's is `ideal_bubble`.
        """
        shares = self.utilisation
        return 1.0 - sum(shares) / self.world_size if any(shares) else 0.0

    @property
    def ideal_bubble(self) -> float:
        """Idle time over work, averaged over ranks: (p-1)/m for GPipe (Narayanan et al. 2021, section 2.2)."""
        work = sum(self.busy)
        return sum(self.idle) / work if work else 0.0

    @property
    def comm_time(self) -> list[float]:
        """Seconds in which at least one of the rank's communications is under way, per rank."""
        return self._covered(Lane.COMM)

    @property
    def exposed_comm(self) -> list[float]:
        """Seconds in which a rank communicates but does not compute, per rank: what communication costs.

        An action that waits for communication midway (BatchNorm over all ranks does) does not compute meanwhile.
        """
        lanes = zip(self._lanes(Lane.COMM), self._lanes(Lane.COMPUTE), strict=True)
        return [exposed_seconds(comm, compute) for comm, compute in lanes]

    @property
    def data_time(self) -> list[float]:
        """Seconds in which a rank gets its share of the batch, per rank: it reads and collates it, or waits for its
        workers.

        What workers load while the rank computes does not count.
        """
        return self._covered(Lane.DATA)

    @property
    def overlap(self) -> float:
        """The fraction of all communication time, summed over ranks, that compute hides; 1 if there is none.

        It is 1 - exposed_comm / comm_time, which DDP's buckets are to raise (Li et al. 2020, section 3.2.3).
        """
        whole = sum(self.comm_time)
        return 1.0 - sum(self.exposed_comm) / whole if whole else 1.0

    @property
    def comm_bytes(self) -> list[dict[str, int]]:
        """Payload bytes by kind of communication, per rank; a message counts at both of its ends."""
        by_rank = []
        for comm in self._lanes(Lane.COMM):
            kinds, which = np.unique(comm["kind"], return_inverse=True)
            sums = [int(comm["bytes"][which == i].sum()) for i in range(len(kinds))]
            by_rank.append(dict(sorted(zip((Kind(kind).word for kind in kinds.tolist()), sums, strict=True))))
        return by_rank

    @property
    def peak_memory(self) -> list[dict[str, int]]:
        """The most bytes held in the step, per rank: of each category, and of all together as "total".

        Categories peak at different moments (activations when the forwards end, gradients when the backwards do), so
        their peaks may sum to more than the total's.
        """
        return [_peak(levels) for levels in self._held()]

    @property
    def memory(self) -> list[dict[str, int]]:
        """The bytes that each rank holds, by category, at the moment of the step when it holds most; their sum is the
        peak.
        """
        tops = (levels[int(levels.sum(axis=1).argmax())] for levels in self._held())
        return [dict(zip(CATEGORIES, top.tolist(), strict=True)) for top in tops]

    @property
    def peak_memory_of_run(self) -> list[dict[str, int]]:
        """`peak_memory` over all steps and over what comes before and after them."""
        return [_peak(levels) for levels in self._held(whole=True)]

    def _lanes(self, lane: Lane) -> list[Array]:
        spans = self._last
        spans = spans[spans["lane"] == lane]
        return [spans[spans["rank"] == rank] for rank in range(self.world_size)]

    def _covered(self, lane: Lane) -> list[float]:
        return [length(covered_times(spans)) for spans in self._lanes(lane)]

    def _held(self, *, whole: bool = False) -> Iterator[Array]:
        """Yield by rank what it holds at each moment of the step, or of the `whole` timeline; see `metrics.levels_of`.

        A step is as long as the rank works on it: one that is done may gather weights while another is still busy.
        """
        for rank in range(self.world_size):
            own = self._last[self._last["rank"] == rank]
            start, end = (-np.inf, np.inf) if whole else extent(own if len(own) else self._last)
            mine = self.held[(self.held["rank"] == rank) & (self.held["time"] <= end)]
            yield levels_of(mine)[int(np.searchsorted(mine["time"], start, side="left")) :]


def _peak(levels: Array) -> dict[str, int]:
    most = dict(zip(CATEGORIES, levels.max(axis=0).tolist(), strict=True))
    return most | {"total": int(levels.sum(axis=1).max())}
