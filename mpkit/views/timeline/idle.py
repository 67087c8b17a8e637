"""Idle time in a form that can be drawn: the gaps between a rank's operations, within steps.

A step lasts from its first operation's start to its last one's end (messages and copies too), on whatever rank; the
part of it that a rank's compute lane does not fill is the rank's part of the bubble. Waits are idle time. Time between
steps does not belong to the bubble, and is left blank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline import metrics

__all__ = ["idle_gaps", "step_extents", "subtract_spans"]

INTERVAL = np.dtype([("start", "<f8"), ("end", "<f8")])


def step_extents(spans: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return [start, end] of each step, merged where they overlap; (n, 2), sorted. Work outside any step is one."""
    work = metrics.active(spans)
    if np.any(work["step"] >= 0):
        work = work[work["step"] >= 0]
    _, where = np.unique(work["step"], return_inverse=True)
    extents = np.empty(where.max() + 1 if len(work) else 0, INTERVAL)
    extents["start"], extents["end"] = np.inf, -np.inf
    np.minimum.at(extents["start"], where, work["start"])
    np.maximum.at(extents["end"], where, work["end"])
    return metrics.covered_times(extents)


def subtract_spans(inner: npt.NDArray[Any], outer: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the parts of `outer` that are not in `inner`; both disjoint and sorted, as `metrics.covered` returns them.

    >>> subtract_spans(np.array([[1.0, 2.0], [5.0, 9.0]]), np.array([[0.0, 3.0], [4.0, 6.0]])).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """
    # The gaps of inner, cut at the borders of outer: sort all borders and keep the pieces that are
    # within outer and not within inner.
    cuts = np.unique(np.concatenate([inner.ravel(), outer.ravel()]))
    if len(cuts) < 2:
        return np.empty((0, 2))
    pieces = np.stack([cuts[:-1], cuts[1:]], axis=1)
    middle = pieces.mean(axis=1)
    keep = _spans_within(middle, outer) & ~_spans_within(middle, inner)
    joined = np.empty(int(keep.sum()), INTERVAL)
    joined["start"], joined["end"] = pieces[keep].T
    return metrics.covered_times(joined)


def idle_gaps(mine: npt.NDArray[Any], extents: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the [start, end] of a rank's idle times within steps, (n, 2) seconds, sorted.

    Args:
        mine: the rank's spans.
        extents: those of the steps of all ranks, as `step_extents` returns them.
    """
    working = subtract_spans(
        metrics.covered_times(metrics.waits_within(mine)), metrics.covered_times(metrics.work(mine))
    )
    return subtract_spans(working, extents)


def _spans_within(times: npt.NDArray[Any], intervals: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not len(intervals):
        return np.zeros(len(times), bool)
    at = np.searchsorted(intervals[:, 0], times, side="right") - 1
    mask: npt.NDArray[Any] = (at >= 0) & (times < intervals[at, 1])
    return mask
