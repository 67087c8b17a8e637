"""Figures: what a Timeline says in numbers about the last step that all ranks completed, and actions' mean times."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline import metrics
from mpkit.trace import CATEGORIES, Kind, Lane

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


Array = npt.NDArray[Any]


def stage_times(timeline: Timeline) -> dict[str, Any]:
    """Return the mean times of a timeline's actions, by stage; see `Timeline.stage_times`.

    Raises:
        ValueError: some stage has no forward in the timeline, or there are no stages.
    """
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
        start, end = metrics.extent(metrics.active(self._last))
        return end - start

    @property
    def busy(self) -> list[float]:
        """Seconds of work, per rank."""
        return [float(b) for b in metrics.busy(self._last, self.world_size)]

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
        return [
            metrics.exposed_seconds(comm, compute)
            for comm, compute in zip(self._lanes(Lane.COMM), self._lanes(Lane.COMPUTE), strict=True)
        ]

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
        return [metrics.length(metrics.covered_times(spans)) for spans in self._lanes(lane)]

    def _held(self, *, whole: bool = False) -> Iterator[Array]:
        """Yield by rank what it holds at each moment of the step, or of the `whole` timeline; see `metrics.levels_of`.

        A step is as long as the rank works on it: one that is done may gather weights while another is still busy.
        """
        for rank in range(self.world_size):
            own = self._last[self._last["rank"] == rank]
            start, end = (-np.inf, np.inf) if whole else metrics.extent(own if len(own) else self._last)
            mine = self.held[(self.held["rank"] == rank) & (self.held["time"] <= end)]
            yield metrics.levels_of(mine)[int(np.searchsorted(mine["time"], start, side="left")) :]


def _peak(levels: Array) -> dict[str, int]:
    """Return the most bytes of each category, and of all together."""
    most = dict(zip(CATEGORIES, levels.max(axis=0).tolist(), strict=True))
    return most | {"total": int(levels.sum(axis=1).max())}
