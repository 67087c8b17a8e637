"""A critical path for the interactive timeline: its operations, what each one's absence would gain, and all slacks.

The browser's half, `path.js`, says what it looks like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline import metrics
from mpkit.timeline.timeline import Timeline
from mpkit.views.timeline.critical_path import heading

if TYPE_CHECKING:
    from mpkit.timeline.dependencies.critical_path import CriticalPath

__all__ = ["MOST", "has_path", "pack_path", "path_of"]

MOST = 20_000
"""The most operations of a step whose path is put into a page, in which no kernel could find it later."""

GAINS = 200
"""The longest operations of a path of which it is said what the step would be without them."""

WHATS = {"gap": "gap", "before the step": "before"}


def has_path(timeline: Timeline) -> bool:
    """Return whether a timeline has a step to find the path of: operations, none of which waits in vain."""
    return bool(len(metrics.work(timeline.spans))) and not timeline.meta.get("waiting")


def path_of(timeline: Timeline, step: int | None = None) -> tuple[dict[str, Any], bytes]:
    """Return the critical path of a step, packed; None: of the last complete one.

    Raises:
        ValueError: as for `Timeline.critical_path`.
    """
    path = timeline.critical_path(step)
    whole = timeline.spans["step"] == path.step if path.step >= 0 else np.ones(len(timeline.spans), bool)
    return pack_path(path, np.flatnonzero(whole), len(timeline.spans))


def pack_path(
    path: CriticalPath, rows: npt.NDArray[Any] | None = None, count: int | None = None
) -> tuple[dict[str, Any], bytes]:
    """Return what is in a path, as JSON, and the slack in seconds of all spans, (count,) float32; nan: it has none.

    >>> import mpkit as mk
    >>> head, slack = pack_path(mk.simulate(mk.Plan.gpipe(2, 1), forward=[1, 3]).critical_path())
    >>> [(rank, start, end, what) for _, rank, start, end, what in head["ops"]][:2]
    [(0, 0.0, 1.0, 'op'), (1, 1.0, 4.0, 'op')]

    Args:
        path: of a step.
        rows: the rows of the step's spans among those that the view has; None: it has the step's only.
        count: the number of spans that the view has.
    """
    step = path.timeline.spans
    rows = np.arange(len(step)) if rows is None else rows
    slack = np.full(len(step) if count is None else count, np.nan, "<f4")
    slack[rows] = path.slack
    begin = path.graph.begin
    ops = [
        [int(rows[op.row]), op.rank, begin + op.start, begin + op.end, WHATS.get(op.kind, "op")]
        for op in path.ops
    ]
    longest = sorted((op for op in path.ops if op.kind not in WHATS), key=lambda op: -op.seconds)[:GAINS]
    free = {int(rows[op.row]): path.if_free(rows=np.array([op.row])) for op in longest}
    return {"step": path.step, "words": heading(path), "ops": ops, "free": free}, slack.tobytes()
