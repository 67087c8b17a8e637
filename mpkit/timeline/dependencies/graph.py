"""StepGraph: the pieces of a step, and what each of them had to wait for; and how spans become one.

A piece begins when the last of those that it needs has ended. So the step can be played again with other durations:
what does not change is who waits for whom, and the order in which each rank works.

lanes      what each rank did, in order: pieces that nothing interrupts (no wait, no copy within an action), waits, and
           the points at which it issued communication, where a piece is cut; time without a reason is a GAP
meetings   which issues belong to one message or one collective: the k-th of its group and kind on each rank
transfers  a collective begins when its last member has come; a message when it was sent
order      every piece after those that it needs
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpkit.common.arrays import Array
from mpkit.trace import Kind, Lane


class Node(IntEnum):
    """What a piece is."""

    WORK = 0  # of an action, a copy or a load
    WAIT = 1  # a point at which a rank waits; it takes no time of its own
    READY = 2  # a message was sent, a collective's last member has come; or the time until one is issued
    TRANSFER = 3  # communication, once it was ready
    GAP = 4  # a rank does nothing known before its next operation: on a GPU, the host has not launched it
    BEFORE = 5  # a rank is not in this step yet


@dataclass
class StepGraph:
    """The pieces of one step, n of them, each after all that it needs."""

    kind: Array  # (n,) `Node`
    rank: Array  # (n,) of READY, the rank that came last
    row: Array  # (n,) of its span in the step's spans; of a GAP, of the operation after it; -1: none
    took: Array  # (n,) seconds
    needs: list[tuple[int, ...]]  # the numbers of the pieces that each waits for
    begin: float  # seconds on the timeline's clock at which the step begins
    end: Array  # (n,) seconds at which each ended, as recorded
    world_size: int
    of_row: dict[int, list[int]]  # by span, its pieces that take time

    @cached_property
    def ends(self) -> Array:
        """(n,) seconds from the step's begin at which each ends, played with the recorded durations."""
        return self.play(self.took)

    @property
    def step_time(self) -> float:
        """Seconds of the step."""
        return float(self.ends.max(initial=0.0))

    def play(self, took: Array, *, without: Collection[int] = ()) -> Array:
        """Return (n,) seconds from the step's begin at which each piece ends if they take `took`, (n,) seconds.

        No piece waits for those in `without`.
        """
        ends = [0.0] * len(self.needs)
        times = np.asarray(took, float).tolist()
        for number, needs in enumerate(self.needs):
            at = 0.0
            for need in needs:
                if ends[need] > at and need not in without:
                    at = ends[need]
            ends[number] = at + times[number]
        return np.array(ends)

    def time_with(self, took: Array) -> float:
        """Return the seconds of the step if its pieces take `took`."""
        return float(self.play(took).max(initial=0.0))

    @cached_property
    def slack(self) -> Array:
        """(n,) seconds that each piece may take longer without the step taking longer."""
        latest = [self.step_time] * len(self.needs)
        took = self.took.tolist()
        for number in range(len(self.needs) - 1, -1, -1):
            at = latest[number] - took[number]
            for need in self.needs[number]:
                if at < latest[need]:
                    latest[need] = at
        return np.asarray(np.maximum(np.array(latest) - self.ends, 0.0))

    def chain(self) -> list[int]:
        """Return the pieces that decide the step, in order: each begins when the one before it ends.

        If several end at the same moment, the rank's own precedes those of others.
        """
        ends = self.ends
        chain = [int(np.argmax(ends))] if len(ends) else []
        while chain and (needs := self.needs[at := chain[-1]]):
            chain.append(max(needs, key=lambda need: (ends[need], self.rank[need] == self.rank[at])))
        return chain[::-1]

    def nodes_of(self, rows: Sequence[int] | Array) -> Array:
        """Return the pieces of some spans that take time; of a communication, those on all of its ranks."""
        own = {n for row in rows for n in self.of_row.get(int(row), ())}
        return np.array(sorted(own.union(*(self._pieces_by_transfer.get(n, ()) for n in own))), int)

    @cached_property
    def ready_of(self) -> dict[int, int]:
        """By TRANSFER, the READY that it follows."""
        return {
            number: ready
            for number in np.flatnonzero(self.kind == Node.TRANSFER).tolist()
            for ready in self.needs[number]
            if self.kind[ready] == Node.READY
        }

    def arrival(self, piece: int, ends: Array) -> tuple[float, float]:
        """Return when the communication that a WAIT (or a GAP that begins with one) waits for was ready, and arrived.

        `ends` are the played ends, (n,) seconds; 0 without communication.
        """
        transfers = [need for need in self.needs[piece] if self.kind[need] == Node.TRANSFER]
        ready = (float(ends[self.ready_of[each]]) for each in transfers if each in self.ready_of)
        return max(ready, default=0.0), max((float(ends[each]) for each in transfers), default=0.0)

    @cached_property
    def _pieces_by_transfer(self) -> dict[int, list[int]]:
        """By TRANSFER, all that belong to the same message or collective."""
        parts: dict[int, list[int]] = defaultdict(list)
        for number, ready in self.ready_of.items():
            parts[ready].append(number)
        return {number: parts[ready] for number, ready in self.ready_of.items()}

    def durations_without(self, nodes: Array) -> Array:
        """Return (n,) the recorded durations, with 0 for some pieces."""
        took: Array = self.took.copy()
        took[nodes] = 0.0
        return took


ISSUE, WAIT, PIECE = range(3)


class Item(NamedTuple):
    """Something on a rank's lane: one of ISSUE, WAIT, PIECE, with the row of its span, and seconds."""

    what: int
    row: int
    start: float
    end: float


def items_of(spans: Array, rows: Array, measured: bool) -> list[Item]:
    """Return what a rank did, in order; `rows` are those of its spans.

    On the wall clock (`measured`) a copy within an action runs beside it, on a stream of its own; on other clocks the
    action includes the copy's time.
    """
    mine = spans[rows]
    kind, lane, depth = mine["kind"], mine["lane"], mine["depth"]
    waits = kind == Kind.WAIT
    actions = (lane == Lane.COMPUTE) & (depth == 0) & ~waits
    copies, loads, comm = lane == Lane.HOST, lane == Lane.DATA, lane == Lane.COMM
    inside = lies_within(mine, copies, actions)
    chosen = (waits, inside, actions, actions | (copies & ~inside))
    waited, own, acted, busy = (_Cover(mine[these]) for these in chosen)
    cuts = np.sort(mine["issued"][comm]).tolist()
    items: list[Item] = []
    for at in np.flatnonzero(actions | (loads & ~waits) | (copies & ~(inside & measured))).tolist():
        span = mine[at]
        free = waited.rest(float(span["start"]), float(span["end"]))
        if actions[at] and not measured:
            free = [part for a, b in free for part in own.rest(a, b)]
        elif loads[at] or (copies[at] and not inside[at]):
            free = [part for a, b in free for part in (busy if loads[at] else acted).rest(a, b) if b > a]
        for a, b in free:  # cut at the points strictly inside
            inner = sorted(set(cuts[bisect_right(cuts, a) : bisect_left(cuts, b)]))
            items += [Item(PIECE, int(rows[at]), *part) for part in pairwise([a, *inner, b])]
    for what, these, begin, end in ((WAIT, waits, "start", "end"), (ISSUE, comm, "issued", "issued")):
        times = zip(rows[these].tolist(), mine[begin][these].tolist(), mine[end][these].tolist(), strict=True)
        items += [Item(what, *each) for each in times]
    # At one moment, what is issued and waited for comes before what begins then; among these the order of the program.
    late = {int(rows[at]) for at in np.flatnonzero(comm & (mine["start"] > mine["issued"])).tolist()}
    return sorted(
        items, key=lambda i: (i.start, i.what == PIECE and i.end > i.start, -1 if i.row in late else i.row)
    )


def lies_within(spans: Array, these: Array, actions: Array) -> Array:
    """Return which of these spans lie within an action of the same rank."""
    starts, ends = spans["start"][actions], spans["end"][actions]
    order = np.argsort(starts, kind="stable")
    last = np.searchsorted(starts[order], spans["start"], side="right") - 1
    until = np.append(ends[order], -np.inf)[last]  # -1, before the first action: the last element
    return np.asarray(these & (spans["end"] <= until) & (spans["end"] > spans["start"]))


class _Cover:
    """The times that some spans cover."""

    def __init__(self, spans: Array) -> None:
        spans = spans[np.argsort(spans["start"], kind="stable")]
        self._starts, self._ends = spans["start"].tolist(), np.maximum.accumulate(spans["end"]).tolist()

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
    """Return the graph of the spans of one step; on the clock "measured", communication begins when it was issued."""
    return _Builder(spans, world_size, clock == "measured").graph()


class _Builder:
    """The pieces so far, and what each of them needs."""

    def __init__(self, spans: Array, world_size: int, measured: bool) -> None:
        self.spans, self.world_size, self.measured = spans, world_size, measured
        active = spans[(spans["kind"] != Kind.WAIT) & (spans["lane"] != Lane.NONE)]
        self.begin = float(active["start"].min(initial=np.inf)) if len(active) else 0.0
        length = float(active["end"].max() - self.begin) if len(active) else 0.0
        self.close = 1e-9 * length + 1e-12  # times nearer than this are equal
        self.columns: list[tuple[int, int, int, float, float]] = []  # kind, rank, row, seconds, when it ended
        self.needs: list[list[int]] = []
        self.issued_after: dict[int, int] = {}  # by communication's row: its rank's last piece before
        self.transfer: dict[int, int] = {}
        self.waits: list[tuple[int, int]] = []  # piece, row of the wait

    def graph(self) -> StepGraph:
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

    # ---- lanes

    def _lane(self, rank: int, items: list[Item]) -> None:
        last, at, first = -1, self.begin, len(self.needs)
        for what, row, start, end in items:
            if start > at + self.close:
                kind = Node.BEFORE if last < 0 else Node.GAP
                last = self._add(kind, rank, row, start - at, start, [last] if last >= 0 else [])
                at = start
            if what == ISSUE:
                self.issued_after[row] = self._issuing_piece(rank, row, start, last, first)
                continue
            # What overlaps with the piece before it, as a host that loads while its device computes, adds the rest.
            kind, begin = (Node.WORK, max(start, at)) if what == PIECE else (Node.WAIT, at)
            last = self._add(kind, rank, row, end - begin, max(end, at), [last] if last >= 0 else [])
            at = max(at, end)
            if what == WAIT:
                self.waits.append((last, row))

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
        """Give a wait what it waited for; the rest of its time has no known reason."""
        _, rank, of, took, end = self.columns[piece]
        found = self.transfer.get(int(self.spans["cause"][row]), -1)
        if found >= 0 and self.columns[found][4] <= end + self.close:
            self.needs[piece].append(found)
            took = min(took, max(end - max(self.columns[found][4], end - took), 0.0))
        kind, took = (Node.GAP, took) if took > self.close else (Node.WAIT, 0.0)
        self.columns[piece] = (int(kind), rank, of, took, end)

    # ---- communication

    def _communication(self) -> None:
        self._busy: dict[tuple[int, bool], list[tuple[float, int, int]]] = defaultdict(list)
        ends, kinds = self.spans["end"].tolist(), self.spans["kind"].tolist()
        for rows in sorted(self._meetings(), key=lambda rows: max(ends[row] for row in rows)):
            is_message = {kinds[row] for row in rows} <= {SEND, RECV}
            sends = [row for row in rows if kinds[row] == SEND]
            # On the wall clock, bytes may wait for their receiver; elsewhere they are on their way before it asks.
            rest = [] if sends and not self.measured else [row for row in rows if kinds[row] != SEND]
            ready = self._ready(sends + rest, max(ends[row] for row in rows))
            for row in rows:
                self._transfer(row, ready, kinds[row] == SEND if is_message else None)

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
        if self.columns[ready][4] > end + self.close:  # it did not wait for the others, as a root may not
            needs = [n] if (n := self.issued_after[row]) >= 0 else []
        if not self.measured:
            needs += self._earlier_in_queue(span, sends, start > self.columns[ready][4] + self.close)
        since = max((self.columns[n][4] for n in needs), default=self.begin)
        piece = self._add(Node.TRANSFER, rank, row, end - max(since, self.begin), end, needs)
        self.transfer[row] = piece
        for way in (True, False) if sends is None else (bool(sends),):
            self._busy[rank, way].append((end, piece, int(span["group"])))

    def _earlier_in_queue(self, span: Any, sends: bool | None, late: bool) -> list[int]:
        """Return what occupied the same way before, if that is why this began late, or if it is of the same group.

        Other communication may overtake if the step is played with other durations.
        """
        start, group = float(span["start"]), int(span["group"])
        ways = [way for way in (True, False) if sends is None or way == sends]
        busy = [each for way in ways for each in self._busy[int(span["rank"]), way][-8:]]
        before = [each for each in busy if each[0] <= start + self.close and (late or each[2] == group)]
        return [max(before)[1]] if before else []

    # ---- order

    def _order_pieces(self) -> StepGraph:
        """Return the graph: each piece after what it needs, by the recorded end among those that could be next.

        Clocks of different machines may contradict each other: of a ring of needs, the earliest piece comes first.
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
