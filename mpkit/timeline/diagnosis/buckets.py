"""Late buckets: gradients that are reduced later than they could be.

Backward makes gradients in the order in which their buckets are issued. So a bucket can begin about when the
backward has
made as large a share of its time as this bucket and those before it have of all bytes (Li et al. 2020, section 3.2.3).
A bucket is late if it is issued only once the backward has ended, though it is not the last one.

    replay   the step with late buckets issued at those points
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.common.units import seconds
from mpkit.timeline.diagnosis.evidence import Evidence
from mpkit.timeline.findings import Finding
from mpkit.trace import Kind

__all__ = ["late_buckets"]

Array = npt.NDArray[Any]
BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
REDUCES = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)


class _Late(NamedTuple):
    """A bucket that a rank issued late.

    Attributes:
        row: of its span.
        number, of: its place among the rank's buckets of one group, from 1, and how many there are.
        seconds: how much later it was issued than its gradients were there.
        backward: the row of the backward that made them.
        made: seconds of that backward until they were there.
    """

    row: int
    number: int
    of: int
    seconds: float
    backward: int
    made: float


def late_buckets(evidence: Evidence, before: Sequence[Finding]) -> Iterable[Finding]:
    """Yield a finding if buckets are issued after the backward although their gradients were there before."""
    graph, late = evidence.graph, _late(evidence)
    if not late:
        return
    took, instead = graph.took.copy(), dict[int, tuple[int, ...]]()
    for each in late:
        for node in graph.of_row.get(each.row, []):
            if (ready := graph.ready_of.get(node)) is not None:
                begin = graph.of_row[each.backward][0]
                instead[ready] = instead.get(ready, ()) + graph.needs[begin]
                took[ready] = max(took[ready], each.made)
    gain = evidence.path.step_time - float(graph.play(took, instead=instead).max(initial=0.0))
    if not evidence.worth(gain):
        return
    first = max(late, key=lambda each: (each.seconds, -each.number))
    same = [each for each in late if each.number == first.number]
    behind = len({each.number for each in late}) - 1
    more = f", and so do {behind} others" if behind > 1 else ", and so does another one" if behind else ""
    yield evidence.make_finding(
        "late bucket",
        f"Bucket {first.number} of {first.of} starts after the backward has ended{more}: about "
        f"{seconds(first.seconds)} after its gradients were there.",
        reason="What is reduced after the backward is hidden by nothing; what is reduced during the backward "
        "costs little.",
        remedy="Reduce gradients as they come: no unused parameters and no hooks that hold them back "
        "(find_unused_parameters, no_sync, gradients that are clipped or accumulated outside of the buckets), and "
        "parameters registered in the order in which the forward uses them.",
        gain=gain, rows=[each.row for each in same] + [each.row for each in late if each not in same],
        check="timeline.critical_path({step}).if_free(kind='all_reduce')"
        if evidence.spans["kind"][first.row] == Kind.ALL_REDUCE
        else "timeline.critical_path({step}).if_free(kind='reduce_scatter')",
    )  # fmt: skip


def _late(evidence: Evidence) -> list[_Late]:
    spans, found = evidence.spans, []
    actions = (spans["depth"] == 0) & np.isin(spans["kind"], BACKWARDS)
    reduces = np.isin(spans["kind"], REDUCES)
    for rank in range(evidence.graph.world_size):
        backwards = np.flatnonzero(actions & (spans["rank"] == rank) & (spans["end"] > spans["start"]))
        rows = np.flatnonzero(reduces & (spans["rank"] == rank))
        if not len(backwards) or len(rows) < 2:
            continue
        last = int(backwards[np.argmax(spans["end"][backwards])])
        for group in np.unique(spans["group"][rows]).tolist():
            mine = rows[spans["group"][rows] == group]
            found += _late_of(spans, mine[np.argsort(spans["issued"][mine], kind="stable")], last)
    return found


def _late_of(spans: Array, rows: Array, backward: int) -> list[_Late]:
    """Return the late ones of a rank's buckets of one group, in the order in which they were issued."""
    start, end = float(spans["start"][backward]), float(spans["end"][backward])
    rows = rows[spans["issued"][rows] >= start]  # those before belong to earlier backwards
    size = spans["bytes"][rows].astype(float)
    if len(rows) < 2 or not size.sum():
        return []
    ready = start + (end - start) * np.cumsum(size) / size.sum()
    issued, close = spans["issued"][rows], 1e-6 * (end - start)
    return [
        _Late(
            row,
            number + 1,
            len(rows),
            float(issued[number] - ready[number]),
            backward,
            float(ready[number] - start),
        )
        for number, row in enumerate(rows.tolist()[:-1])
        if issued[number] >= end - close
    ]
