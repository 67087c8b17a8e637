"""Where the compute lane stands still, and what for.

A gap that ends with a communication is a wait for it. Of the other gaps those within an action of a GPU are waits for
its host, which has not launched the next kernel yet; between actions a gap is only idle time.

A communication that nobody waited for was over in time. Its result was needed by the next work of another kind at the
latest, so there stands a wait of no length: on a slower link it becomes one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpkit.timeline.foreign.actions import ProfiledAction
from mpkit.timeline.foreign.lanes import DeviceWork
from mpkit.trace import Kind

__all__ = ["longest", "waits_of"]


def waits_of(
    make: Any, rows: Sequence[Any], work: DeviceWork, actions: Sequence[ProfiledAction], *, on_device: bool
) -> list[Any]:
    """Return the waits of one rank.

    Args:
        make: makes a row from its columns.
        rows: the rank's communications and actions so far.
        work: what it computes.
        actions: its actions.
        on_device: whether its work is that of a GPU, which a host launches.
    """
    comms = sorted((i for i, row in enumerate(rows) if 32 <= row.kind < 64), key=lambda i: rows[i].end)
    ends = [rows[i].end for i in comms]
    outer = [row for row in rows if row.kind < Kind.WAIT and row.depth == 0]
    found: list[Any] = []
    waited: set[int] = set()

    def gap(start: int, end: int, row: Any, depth: int) -> None:
        """Add the waits of one gap, before which `row` is the next or around which it is the current action."""
        low, high = bisect_right(ends, start), bisect_right(ends, end)
        place = dict(depth=depth, step=row.step, stage=row.stage, microbatch=row.microbatch)
        at = start
        if high > low:
            comm = comms[high - 1]
            begin = max(start, rows[comm].start)
            if depth and on_device and begin > at:
                found.append(make(at, begin, Kind.WAIT, **place))
            found.append(make(begin, rows[comm].end, Kind.WAIT, ref=comm, **place))
            waited.add(comm)
            at = rows[comm].end
        if depth and on_device and end > at:
            found.append(make(at, end, Kind.WAIT, **place))

    for action, row in zip(actions, outer, strict=True):
        start, end = work.start[action.first : action.last], work.end[action.first : action.last]
        reached = np.maximum.accumulate(np.maximum(end, row.start))
        for at in np.flatnonzero(start[1:] > reached[:-1]).tolist():
            gap(int(reached[at]), int(start[at + 1]), row, 1)
    for before, row in pairwise(outer):
        if row.start > before.end:
            gap(before.end, row.start, row, 0)
    found += _at_the_latest(make, rows, outer, set(comms) - waited)
    return found


def longest(waits: Sequence[Any], most: int) -> list[Any]:
    """Return the waits for communications, and of those for the host the longest.

    Args:
        waits: all waits.
        most: how many waits for the host are kept.
    """
    idle = sorted((wait.end - wait.start for wait in waits if wait.ref < 0), reverse=True)
    shortest = idle[most] if len(idle) > most else -1
    return [wait for wait in waits if wait.ref >= 0 or wait.end - wait.start > shortest]


def _at_the_latest(make: Any, rows: Sequence[Any], outer: Sequence[Any], left: set[int]) -> list[Any]:
    """Return waits of no length, where the next work of another kind or step begins."""
    starts = [row.start for row in outer]
    found = []
    for comm in sorted(left):
        row = rows[comm]
        if row.kind == Kind.SEND or not outer:
            continue
        at = bisect_left(starts, row.end)
        current = outer[max(bisect_right(starts, row.start) - 1, 0)]
        while (
            row.kind != Kind.RECV
            and at < len(outer)
            and (outer[at].kind, outer[at].step) == (current.kind, current.step)
        ):
            at += 1
        if at < len(outer):
            then = outer[at]
            found.append(
                make(
                    then.start,
                    then.start,
                    Kind.WAIT,
                    step=then.step,
                    stage=then.stage,
                    microbatch=then.microbatch,
                    ref=comm,
                )
            )
    return found
