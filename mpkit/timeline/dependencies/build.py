"""From the spans of a step to its graph.

lanes      what each rank did, in order: pieces that nothing interrupts (no wait, no copy within an action), waits, and
           the points at which it issued communication, where a piece is cut; time without a reason is a GAP
meetings   which issues belong to one message or one collective: the k-th of its group and kind on each rank
transfers  a collective begins when its last member has come; a message when it was sent
order      every piece after those that it needs
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.timeline.dependencies.graph import Node, StepGraph
from mpkit.trace import Kind, Lane

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


SEND, RECV = int(Kind.SEND), int(Kind.RECV)


def graph_of(spans: Array, world_size: int, clock: str) -> StepGraph:
    """Return the graph of one step.

    Args:
        spans: (n,) of `SPAN`, those of one step.
        world_size: the number of ranks.
        clock: the timeline's clock; on "measured", a communication's span begins when its rank issued it.
    """
    return _Builder(spans, world_size, clock == "measured").graph()


class _Builder:
    """The pieces so far: kind, rank, row, seconds, when it ended, what it needs."""

    def __init__(self, spans: Array, world_size: int, measured: bool) -> None:
        self.spans, self.world_size, self.measured = spans, world_size, measured
        active = spans[(spans["kind"] != Kind.WAIT) & (spans["lane"] != Lane.NONE)]
        self.begin = float(active["start"].min(initial=np.inf)) if len(active) else 0.0
        length = float(active["end"].max() - self.begin) if len(active) else 0.0
        self.close = 1e-9 * length + 1e-12  # times nearer than this are equal
        self.columns: list[tuple[int, int, int, float, float]] = []
        self.needs: list[list[int]] = []
        self.issued_after: dict[int, int] = {}  # by communication's row: its rank's last piece before
        self.transfer: dict[int, int] = {}
        self.waits: list[tuple[int, int]] = []  # piece, row of the wait

    def graph(self) -> StepGraph:
        """Build it."""
        for rank in range(self.world_size):
            rows = np.flatnonzero(self.spans["rank"] == rank)
            self._lane(rank, items_of(self.spans, rows, self.measured))
        self._communication()
        for piece, row in self.waits:
            self._wait(piece, row)
        return self._order_pieces()

    def _add(self, kind: Node, rank: int, row: int, took: float, end: float, needs: list[int]) -> int:
        self.columns.append((int(kind), rank, row, max(took, 0.0), end))
        self.needs.append(needs)
        return len(self.needs) - 1

    # ---- lanes ----------------------------------------------------------------------------------------------

    def _lane(self, rank: int, items: list[Item]) -> None:
        last, at, first = -1, self.begin, len(self.needs)
        for what, row, start, end in items:
            if start > at + self.close:
                kind = Node.BEFORE if last < 0 else Node.GAP
                last = self._add(kind, rank, row, start - at, start, [last] if last >= 0 else [])
                at = start
            needs = [last] if last >= 0 else []
            if what == ISSUE:
                self.issued_after[row] = self._issuing_piece(rank, row, start, last, first)
            elif what == PIECE:
                # What overlaps with the piece before it, as a host that loads while its device computes, adds the rest.
                last = self._add(Node.WORK, rank, row, end - max(start, at), max(end, at), needs)
                at = max(at, end)
            else:
                last = self._add(Node.WAIT, rank, row, max(end - at, 0.0), max(end, at), needs)
                self.waits.append((last, row))
                at = max(at, end)

    def _issuing_piece(self, rank: int, row: int, time: float, last: int, first: int) -> int:
        """Return the piece after which a rank issued a communication.

        On a stream of its own one may begin while the compute lane stands still: then it came some time after the last
        piece that had ended by then.
        """
        if last < 0 or self.columns[last][4] <= time + self.close:
            return last
        before = last
        while before >= first and self.columns[before][4] > time + self.close:
            before -= 1
        ended, needs = (self.columns[before][4], [before]) if before >= first else (self.begin, [])
        return self._add(Node.READY, rank, row, time - ended, time, needs)

    def _wait(self, piece: int, row: int) -> None:
        """Give a wait what it waited for; what is left of its time has no known reason."""
        _, rank, of, took, end = self.columns[piece]
        found = self.transfer.get(int(self.spans["cause"][row]), -1)
        if found >= 0 and self.columns[found][4] <= end + self.close:
            self.needs[piece].append(found)
            took = min(took, max(end - max(self.columns[found][4], end - took), 0.0))
        if took > self.close:
            kind = Node.GAP
        else:
            kind, took = Node.WAIT, 0.0
        self.columns[piece] = (int(kind), rank, of, took, end)

    # ---- communication --------------------------------------------------------------------------------------

    def _communication(self) -> None:
        self._busy: dict[tuple[int, bool], list[tuple[float, int, int]]] = defaultdict(list)
        meetings = sorted(self._meetings(), key=lambda rows: max(float(self.spans["end"][r]) for r in rows))
        for rows in meetings:
            kinds = {int(self.spans["kind"][row]) for row in rows}
            if kinds <= {SEND, RECV}:
                self._message(rows)
            else:
                self._collective(rows)

    def _meetings(self) -> list[list[int]]:
        """Return the rows of each message and collective: the k-th of its group and kind on each rank."""
        comm = np.flatnonzero(self.spans["lane"] == Lane.COMM)
        order = comm[np.lexsort((comm, self.spans["issued"][comm]))]
        count: dict[tuple[int, int, int], int] = defaultdict(int)
        meetings: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row in order.tolist():
            span = self.spans[row]
            rank, kind, group = int(span["rank"]), int(span["kind"]), int(span["group"])
            meets = 0 if kind in (SEND, RECV) else kind
            # Without a group's name there is nothing to match: the rank is on its own.
            key = (group, meets, count[rank, kind, group]) if group else (-1 - row, meets, 0)
            count[rank, kind, group] += 1
            meetings[key].append(row)
        return list(meetings.values())

    def _message(self, rows: list[int]) -> None:
        spans = self.spans
        sends = [row for row in rows if spans["kind"][row] == SEND]
        asks = [row for row in rows if spans["kind"][row] == RECV]
        # On the wall clock, bytes may wait for their receiver; elsewhere they are on their way before it asks.
        first = sends + (asks if self.measured or not sends else [])
        ready = self._ready(first, max(float(spans["end"][row]) for row in rows))
        for row in rows:
            self._transfer(row, ready, spans["kind"][row] == SEND)

    def _collective(self, rows: list[int]) -> None:
        ready = self._ready(rows, max(float(self.spans["end"][row]) for row in rows))
        for row in rows:
            self._transfer(row, ready, None)

    def _ready(self, rows: list[int], end: float) -> int:
        """Return the point at which the last of these has issued its part."""
        last = max(rows, key=lambda row: float(self.spans["issued"][row]))
        needs = sorted({n for row in rows if (n := self.issued_after[row]) >= 0})
        when = min(max(float(self.spans["issued"][last]), self.begin), end)
        needs = [n for n in needs if self.columns[n][4] <= end + self.close]
        return self._add(Node.READY, int(self.spans["rank"][last]), last, 0.0, when, needs)

    def _transfer(self, row: int, ready: int, sends: bool | None) -> None:
        span = self.spans[row]
        rank, start, end = int(span["rank"]), float(span["start"]), float(span["end"])
        needs = [ready]
        if (
            self.columns[ready][4] > end + self.close
        ):  # this rank did not wait for the others, as a root may not
            needs = [n] if (n := self.issued_after[row]) >= 0 else []
        if not self.measured:
            needs += self._earlier_in_queue(span, sends, start > self.columns[ready][4] + self.close)
        since = max((self.columns[n][4] for n in needs), default=self.begin)
        piece = self._add(Node.TRANSFER, rank, row, end - max(since, self.begin), end, needs)
        self.transfer[row] = piece
        for way in (True, False) if sends is None else (bool(sends),):
            self._busy[rank, way].append((end, piece, int(span["group"])))

    def _earlier_in_queue(self, span: Any, sends: bool | None, late: bool) -> list[int]:
        """Return what occupied the same way before, if that is why this began late, or else of the same group.

        Others may overtake each other if the step is played with other durations.
        """
        start, group = float(span["start"]), int(span["group"])
        ways = [way for way in (True, False) if sends is None or way == sends]
        busy = [each for way in ways for each in self._busy[int(span["rank"]), way][-8:]]
        before = [each for each in busy if each[0] <= start + self.close and (late or each[2] == group)]
        return [max(before)[1]] if before else []

    # ---- order ----------------------------------------------------------------------------------------------

    def _order_pieces(self) -> StepGraph:
        """Return the graph: each piece after what it needs, by the recorded end among those that could be next.

        Clocks of different machines may contradict each other: of a ring of needs, the earliest piece is taken first.
        """
        after: list[list[int]] = [[] for _ in self.needs]
        missing = [len(set(needs)) for needs in self.needs]
        for number, needs in enumerate(self.needs):
            for need in set(needs):
                after[need].append(number)
        ends = [each[4] for each in self.columns]
        heap = [(ends[n], n) for n, left in enumerate(missing) if not left]
        heapify(heap)
        place = [-1] * len(ends)
        order: list[int] = []
        while len(order) < len(ends):
            if not heap:
                left = min((n for n in range(len(ends)) if place[n] < 0), key=ends.__getitem__)
                heap = [(ends[left], left)]
            number = heappop(heap)[1]
            if place[number] >= 0:
                continue
            place[number] = len(order)
            order.append(number)
            for each in after[number]:
                missing[each] -= 1
                if not missing[each]:
                    heappush(heap, (ends[each], each))
        needs_of = [tuple(sorted({place[n] for n in self.needs[o] if place[n] < place[o]})) for o in order]
        table = np.array([self.columns[o] for o in order], float).reshape(-1, 5)
        of_row: dict[int, list[int]] = defaultdict(list)
        for number, (kind, _, row, took, _) in enumerate(table.tolist()):
            if kind in (Node.WORK, Node.TRANSFER) and took > 0:
                of_row[int(row)].append(number)
        kind, rank, row = (table[:, i].astype(int) for i in range(3))
        return StepGraph(
            kind, rank, row, table[:, 3], needs_of, self.begin, table[:, 4], self.world_size, dict(of_row)
        )  # fmt: skip
