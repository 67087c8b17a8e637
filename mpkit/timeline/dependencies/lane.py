"""Lane: what one rank did in a step, in order.

    pieces    the parts of its operations that nothing interrupts: no wait, and no copy within an action; of other
              copies what no action hides, and of loading what neither hides
    waits     the points at which it waited for a communication
    issues    the points at which it issued one; a piece is cut there

An action that waits in its middle, or issues a collective there, so becomes several pieces.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.trace import Kind, Lane

__all__ = ["ISSUE", "PIECE", "WAIT", "Item", "items_of", "lies_within"]

Array = npt.NDArray[Any]

ISSUE, WAIT, PIECE = range(3)


class Item(NamedTuple):
    """Something on a rank's lane: one of ISSUE, WAIT, PIECE, with the row of its span, and seconds."""

    what: int
    row: int
    start: float
    end: float


def items_of(spans: Array, rows: Array, measured: bool) -> list[Item]:
    """Return what a rank did, in order.

    Args:
        spans: (n,) of `SPAN`, of all ranks.
        rows: the rows of this rank's spans.
        measured: whether the clock is the wall clock: then a copy within an action runs beside it, on a stream of its
            own; on other clocks the action includes the copy's time.
    """
    mine = spans[rows]
    kind, lane, depth = mine["kind"], mine["lane"], mine["depth"]
    waits = kind == Kind.WAIT
    actions = (lane == Lane.COMPUTE) & (depth == 0) & ~waits
    copies, loads, comm = lane == Lane.HOST, lane == Lane.DATA, lane == Lane.COMM
    inside = lies_within(mine, copies, actions)
    waited = _Cover(mine["start"][waits], mine["end"][waits])
    acted, busy = (
        _Cover(mine["start"][these], mine["end"][these]) for these in (actions, actions | (copies & ~inside))
    )
    cuts = np.sort(mine["issued"][comm]).tolist()
    own = _Cover(mine["start"][inside], mine["end"][inside])
    items: list[Item] = []
    for at in np.flatnonzero(actions | (loads & ~waits) | (copies & ~(inside & measured))).tolist():
        span = mine[at]
        free = waited.rest(float(span["start"]), float(span["end"]))
        if actions[at] and not measured:
            free = [part for a, b in free for part in own.rest(a, b)]
        elif loads[at] or (copies[at] and not inside[at]):
            free = [part for a, b in free for part in (busy if loads[at] else acted).rest(a, b) if b > a]
        for a, b in free:
            items += _cut(int(rows[at]), a, b, cuts)
    items += [
        Item(WAIT, int(rows[at]), float(mine["start"][at]), float(mine["end"][at]))
        for at in np.flatnonzero(waits).tolist()
    ]
    items += [
        Item(ISSUE, int(rows[at]), float(mine["issued"][at]), float(mine["issued"][at]))
        for at in np.flatnonzero(comm).tolist()
    ]
    # At one moment, what is issued and waited for comes before what begins then; among these the order of the program.
    late = {int(rows[at]) for at in np.flatnonzero(comm & (mine["start"] > mine["issued"])).tolist()}
    return sorted(
        items, key=lambda i: (i.start, i.what == PIECE and i.end > i.start, -1 if i.row in late else i.row)
    )


def _cut(row: int, start: float, end: float, cuts: list[float]) -> list[Item]:
    """Cut a piece at the points strictly inside it."""
    inner = sorted(set(cuts[bisect_right(cuts, start) : bisect_left(cuts, end)]))
    bounds = [start, *inner, end]
    return [Item(PIECE, row, a, b) for a, b in pairwise(bounds)]


def lies_within(spans: Array, these: Array, actions: Array) -> Array:
    """Return which of these spans lie within an action of the same rank."""
    starts, ends = spans["start"][actions], spans["end"][actions]
    order = np.argsort(starts, kind="stable")
    last = np.searchsorted(starts[order], spans["start"], side="right") - 1
    known = last >= 0
    until = (
        np.where(known, ends[order][np.maximum(last, 0)], -np.inf) if len(ends) else np.full(len(spans), -1.0)
    )
    return np.asarray(these & known & (spans["end"] <= until) & (spans["end"] > spans["start"]))


class _Cover:
    """The times that some spans cover."""

    def __init__(self, starts: Array, ends: Array) -> None:
        order = np.argsort(starts, kind="stable")
        self._starts, self._ends = starts[order].tolist(), np.maximum.accumulate(ends[order]).tolist()

    def rest(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return the parts between two times that are not covered."""
        if end <= start:
            return [(start, end)]
        free, at = [], start
        for number in range(bisect_right(self._ends, start), len(self._starts)):
            if self._starts[number] >= end:
                break
            if self._starts[number] > at:
                free.append((at, self._starts[number]))
            at = max(at, self._ends[number])
        if at < end:
            free.append((at, end))
        return free
