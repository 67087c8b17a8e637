"""Breakdown: how much of its time a device computes, does something else or is idle, as HolisticTraceAnalysis counts.

    total            from the begin of the rank's first kernel to the end of its last one
    compute          at least one kernel computes
    other            a communication or a copy is under way, and nothing computes
    idle             neither
    overlap          of the time in which it communicates, the share in which it computes as well

Kernels are what the timeline has: actions without the waits inside them, communication, and copies. So
`get_temporal_breakdown` and `get_comm_comp_overlap` of HTA (facebookresearch/HolisticTraceAnalysis) define them, where
"other" is `non_compute_time`. HTA leaves out the last profiler step, and shrinks each kernel to whole microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.common.display import data_frame, draw
from mpkit.timeline import metrics
from mpkit.trace import Lane

__all__ = ["Breakdown", "breakdown"]

Array = npt.NDArray[Any]
COLUMNS = ("total", "idle", "compute", "other", "communication", "overlapped")


@dataclass(frozen=True)
class Breakdown:
    """Seconds by rank, (ranks,) each; `idle`, `compute` and `other` add up to `total`.

    Attributes:
        total: from the first kernel to the last.
        idle: no kernel runs.
        compute: a kernel computes.
        other: communication or copies only.
        communication: a communication is under way, whether hidden or not.
        overlapped: of that, the part in which a kernel computes.
        numbers: the number of each rank in its program, where that is not its place here.
    """

    total: Array
    idle: Array
    compute: Array
    other: Array
    communication: Array
    overlapped: Array
    numbers: tuple[str, ...] = ()

    @property
    def overlap(self) -> Array:
        """By rank, the share of communication that computation hides; 1 where there is none."""
        there = self.communication > 0
        return np.divide(self.overlapped, self.communication, out=np.ones(len(self.total)), where=there)

    def to_dataframe(self) -> Any:
        """Return one row per rank, in seconds, and the overlap as a share.

        Raises:
            ImportError: pandas is not installed.
        """
        columns = {name: getattr(self, name) for name in (*COLUMNS, "overlap")}
        return data_frame({"rank": np.arange(len(self.total)), **columns})

    def __str__(self) -> str:
        return str(draw(self, "text"))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": draw(self, "html"), "text/plain": str(self)}


def breakdown(spans: Array, world_size: int, tick: float = 0.0) -> Breakdown:
    """Return the breakdown of some spans, (n,) of `SPAN`.

    Args:
        spans: of all ranks.
        world_size: the number of ranks.
        tick: seconds; what runs without a break begins at the next whole multiple and ends at the one before; 0: times
            as they are.
    """
    rows = np.array([_of_rank(spans[spans["rank"] == rank], tick) for rank in range(world_size)])
    return Breakdown(*rows.reshape(-1, len(COLUMNS)).T)


def _of_rank(spans: Array, tick: float) -> tuple[float, ...]:
    """Return a rank's seconds in the order of COLUMNS."""
    waits = metrics.covered_times(metrics.waits_within(spans))
    works = _round_to_ticks(_minus(metrics.covered_times(metrics.work(spans)), waits), tick)
    comm = _round_to_ticks(metrics.covered_times(spans[spans["lane"] == Lane.COMM]), tick)
    copies = _round_to_ticks(metrics.covered_times(spans[spans["lane"] == Lane.HOST]), tick)
    moved = _union(comm, copies)
    busy = _union(works, moved)
    total = float(busy[-1, 1] - busy[0, 0]) if len(busy) else 0.0
    compute = metrics.length(works)
    other = metrics.length(busy) - compute
    return total, total - compute - other, compute, other, metrics.length(comm), metrics.common(comm, works)


def _union(a: Array, b: Array) -> Array:
    """Return the times that one of them covers; each is (k, 2), disjoint intervals."""
    both = np.concatenate([a, b])
    whole = np.zeros(len(both), [("start", "<f8"), ("end", "<f8")])
    whole["start"], whole["end"] = both[:, 0], both[:, 1]
    return metrics.covered_times(whole)


def _minus(a: Array, b: Array) -> Array:
    """Return the times that only the first covers; each is (k, 2), disjoint intervals in order."""
    if not len(a) or not len(b):
        return a
    # Between the intervals of b, and before and after all of them.
    free = np.stack([np.concatenate([[-np.inf], b[:, 1]]), np.concatenate([b[:, 0], [np.inf]])], axis=1)
    first = np.searchsorted(free[:, 1], a[:, 0], side="right")
    last = np.searchsorted(free[:, 0], a[:, 1], side="left")
    count = np.maximum(last - first, 0)
    of_a = np.repeat(np.arange(len(a)), count)
    of_free = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    parts = np.stack(
        [np.maximum(a[of_a, 0], free[of_free, 0]), np.minimum(a[of_a, 1], free[of_free, 1])], axis=1
    )
    return np.asarray(parts[parts[:, 1] > parts[:, 0]])


def _round_to_ticks(intervals: Array, tick: float) -> Array:
    """Shrink intervals to whole multiples of a tick."""
    if not tick:
        return intervals
    parts = np.stack(
        [np.ceil(intervals[:, 0] / tick) * tick, np.floor(intervals[:, 1] / tick) * tick], axis=1
    )
    return np.asarray(parts[parts[:, 1] > parts[:, 0]])
