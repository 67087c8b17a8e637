"""Why a rank is idle: the time that it does not work, split by cause.

    warm-up         before its first action: nothing has come yet
    message         between its actions: another rank has not yet made what it waits for
    communication   so too, but it has been made, and is on its way
    cool-down       after its last action: others still work
    data            what of all this would not be if every rank had its share of the batch at once
    imbalance       what of the rest would not be if every action of a kind took the mean of its kind, on every rank
    other           nothing is known that it waits for: a copy, or time between ops on the measured clock

A schedule changes the first two and the cool-down, a faster link the communication, more workers the data, a better
cut the imbalance. Data and imbalance are found by playing the step once more, without loading and with equal
actions: who waits for whom stays, only how long things take changes.

    pieces    what each rank does, in order, and which communication it waits for before each piece
    played    when each piece would begin and end, given how long it takes
    causes    the gaps between them, by cause; of the times as they are, and of equal ones
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit import metrics
from mpkit.timeline import Timeline
from mpkit.trace import Kind

__all__ = ["CAUSES", "idle_by_cause"]

Array = npt.NDArray[Any]

CAUSES = ("warm-up", "message", "imbalance", "communication", "data", "cool-down", "other")
WARM_UP, MESSAGE, IMBALANCE, COMMUNICATION, DATA, COOL_DOWN, OTHER = range(len(CAUSES))


def idle_by_cause(timeline: Timeline) -> Array:
    """Seconds by rank and cause, (ranks, causes): of the last complete step, within its makespan.

    The sum over causes is `timeline.idle`.

    >>> import mpkit as mk
    >>> t = mk.simulate(mk.Plan.gpipe(3, 4), forward=[1, 1, 2], hop=0.25)
    >>> for rank, seconds in enumerate(idle_by_cause(t).round(2).tolist()):
    ...     print(rank, {cause: s for cause, s in zip(CAUSES, seconds) if s})
    0 {'message': 7.42, 'imbalance': 3.33, 'communication': 0.25}
    1 {'warm-up': 1.58, 'message': 3.58, 'imbalance': 3.33, 'communication': 0.25, 'cool-down': 2.25}
    2 {'warm-up': 2.5, 'cool-down': 4.5}
    """
    one = timeline.step(timeline.steps[-1]) if timeline.steps else timeline
    graph = _Graph(one.spans, timeline.world_size)
    found = graph.causes(graph.play(1.0))
    if graph.loads:
        at_once = graph.causes(graph.play(1.0, data=False), data=False)
        at_once[:, DATA] = np.maximum(found.sum(axis=1) - at_once.sum(axis=1), 0.0)
        found = at_once
    equal = graph.causes(graph.play(0.0, data=False), data=False)
    equal[:, DATA] = found[:, DATA]
    # The slowest rank would wait more if all were equal: its idle time is as it is.
    excess = found.sum(axis=1) - equal.sum(axis=1)
    less = excess > 1e-12 * max(float(found.sum()), 1e-30)
    found[less] = equal[less]
    found[less, IMBALANCE] = excess[less]
    return found


@dataclass
class _Piece:
    """A part of an action that no wait interrupts.

    Attributes:
        rank: whose.
        start, took: seconds.
        usual: seconds that it would take if all actions of its kind took the same.
        pause: seconds before it in which its rank did nothing that is known.
        data: seconds before it in which its rank got its share of the batch.
        needs: communication that is waited for before it.
    """

    rank: int
    start: float
    took: float
    usual: float
    pause: float = 0.0
    data: float = 0.0
    needs: list[_Message] = field(default_factory=list)


@dataclass
class _Message:
    """A communication: it begins when the last of its senders has issued it.

    Attributes:
        issued: by sender: the number of a piece there, the share of it that is done by then, and seconds after that;
            piece -1: before all work, and the time.
        took: seconds from its beginning to its end.
    """

    issued: list[tuple[int, float, float]]
    took: float


class _Graph:
    """What each rank does, and what that waits for.

    Args:
        spans: of one step.
        world_size: how many ranks.
    """

    def __init__(self, spans: Array, world_size: int) -> None:
        self._world_size = world_size
        work, waits = metrics.work(spans), spans[spans["kind"] == Kind.WAIT]
        data = metrics.loading(spans)
        self.loads = len(data) > 0
        begin = self._begin = metrics.extent(metrics.done(spans))[0]
        took = (work["end"] - work["start"]) - _waited_within(work, metrics.waits_within(spans))
        usual = {kind: float(took[work["kind"] == kind].mean()) for kind in np.unique(work["kind"]).tolist()}
        # ---- pieces, by when they start: so whatever one needs is before it
        self._pieces: list[_Piece] = []
        causes: list[list[int]] = []
        for rank in range(world_size):
            mine, own_waits = work["rank"] == rank, waits[waits["rank"] == rank]
            own_data = data[data["rank"] == rank]
            at, before = begin, None
            for action, whole in zip(work[mine], took[mine].tolist(), strict=True):
                share = usual[int(action["kind"])] / whole if whole > 0 else 1.0
                for start, end in _uninterrupted(action, own_waits):
                    gap = own_waits[(own_waits["end"] > at) & (own_waits["start"] < start)]
                    waited = metrics.length(metrics.covered(_clipped(gap, at, start)))
                    loaded = metrics.length(metrics.covered(_clipped(own_data, at, start)))
                    pause = 0.0 if before is None else max(start - at - waited - loaded, 0.0)
                    before = _Piece(rank, start, end - start, (end - start) * share, pause, loaded)
                    self._pieces.append(before)
                    causes.append([int(cause) for cause in gap["cause"] if cause >= 0])
                    at = end
        order = sorted(range(len(self._pieces)), key=lambda i: (self._pieces[i].start, self._pieces[i].took))
        self._pieces = [self._pieces[i] for i in order]
        self._of = [
            [i for i, piece in enumerate(self._pieces) if piece.rank == rank] for rank in range(world_size)
        ]
        self._starts = [np.array([self._pieces[i].start for i in numbers]) for numbers in self._of]
        # ---- what they need
        known: dict[int, _Message] = {}
        for number, old in enumerate(order):
            for cause in causes[old]:
                if cause not in known:
                    known[cause] = self._message(spans, cause)
                self._pieces[number].needs.append(known[cause])

    def _message(self, spans: Array, cause: int) -> _Message:
        """A communication, with where in its senders' work it was issued."""
        comm = spans[cause]
        began = float(comm["start"])
        if comm["kind"] in (Kind.SEND, Kind.RECV):
            issued = [(int(comm["peer"]), began)]
        else:
            same = (
                (spans["kind"] == comm["kind"])
                & (spans["group"] == comm["group"])
                & (spans["start"] == began)
            )
            issued = [(int(each["rank"]), min(float(each["issued"]), began)) for each in spans[same]]
        issued = [(rank, time) for rank, time in issued if 0 <= rank < self._world_size]
        queued = began - max(
            (time for _, time in issued), default=began
        )  # behind what the link was busy with
        places = [self._place(rank, time) for rank, time in issued]
        return _Message(
            [(n, share, after + queued) for n, share, after in places], float(comm["end"]) - began
        )

    def _place(self, rank: int, time: float) -> tuple[int, float, float]:
        """Where a time is in a rank's work: a piece, the share of it that is done, and seconds after it.

        Before all work of the rank: no piece, -1, and the time itself.
        """
        at = int(np.searchsorted(self._starts[rank], time, side="right")) - 1
        if at > 0:  # as one piece ends the next may begin: what is issued then is of the first
            before = self._pieces[self._of[rank][at - 1]]
            at -= before.start + before.took >= time
        if at < 0:
            return -1, 0.0, time
        number = self._of[rank][at]
        piece = self._pieces[number]
        done = time - piece.start
        if done <= piece.took:
            return number, done / piece.took if piece.took else 1.0, 0.0
        return number, 1.0, done - piece.took

    def play(self, real: float, *, data: bool = True) -> list[tuple[_Piece, float, float, float, float]]:
        """When each piece begins and ends: (piece, when its rank was free, when the last it needs began, start, end).

        Args:
            real: 1 for the times that there are, 0 for equal ones.
            data: whether data has to be loaded, or is there.
        """
        begin = self._begin
        played: list[tuple[_Piece, float, float, float, float]] = []
        free: dict[int, float] = {}
        for piece in self._pieces:
            first = piece.rank not in free
            at = free.get(piece.rank, begin) + piece.data * data
            ready = at if not first or piece.needs else at + real * (piece.start - begin - piece.data)
            began = ready
            for message in piece.needs:
                starts = [
                    after + (played[n][3] + share * (played[n][4] - played[n][3]) if n >= 0 else 0.0)
                    for n, share, after in message.issued
                ]
                there = max(starts, default=ready)
                if there + message.took > ready:
                    began, ready = there, there + message.took
            start = ready + piece.pause
            end = start + (piece.took if real else piece.usual)
            free[piece.rank] = end
            played.append((piece, at, min(max(began, at), ready), start, end))
        return played

    def causes(self, played: list[tuple[_Piece, float, float, float, float]], *, data: bool = True) -> Array:
        """(ranks, causes) seconds, of what was played with data to be loaded, or without."""
        found = np.zeros((self._world_size, len(CAUSES)))
        if not played:
            return found
        begin = self._begin if data else min(p[3] for p in played)
        end = max(p[4] for p in played)
        last = np.full(self._world_size, np.nan)
        for piece, free, began, start, stop in played:
            rank = piece.rank
            found[rank, DATA] += piece.data * data
            if np.isnan(last[rank]):
                found[rank, WARM_UP] += start - begin - piece.data * data
            else:
                found[rank, MESSAGE] += began - free
                found[rank, COMMUNICATION] += start - piece.pause - began
                found[rank, OTHER] += piece.pause
            last[rank] = stop
        found[:, COOL_DOWN] = np.where(np.isnan(last), 0.0, end - last)
        found[np.isnan(last), OTHER] = end - begin
        return found


def _uninterrupted(action: Array, waits: Array) -> Iterator[tuple[float, float]]:
    """The parts of an action that its rank does not wait in."""
    start, end = float(action["start"]), float(action["end"])
    for a, b in metrics.covered(_clipped(waits[waits["depth"] > 0], start, end)).tolist():
        if a > start:
            yield start, a
        start = b
    yield start, end


def _clipped(spans: Array, start: float, end: float) -> Array:
    """Those of the spans that have a part between two times, cut to it."""
    cut = spans[(spans["start"] < end) & (spans["end"] > start)].copy()
    cut["start"], cut["end"] = np.maximum(cut["start"], start), np.minimum(cut["end"], end)
    return cut


def _waited_within(work: Array, waits: Array) -> Array:
    """By action, the seconds in which it waits in its middle."""
    found = np.zeros(len(work))
    for number, action in enumerate(work) if len(waits) else ():
        own = waits[waits["rank"] == action["rank"]]
        found[number] = metrics.length(
            metrics.covered(_clipped(own, float(action["start"]), float(action["end"])))
        )
    return found
