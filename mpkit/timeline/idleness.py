"""Why a rank is idle: the time that it does not work, split by cause.

    warm-up         before its first action: nothing has arrived yet
    message         between its actions: another rank has not yet computed what it waits for
    communication   also between its actions, but the result has been computed and is under way
    cool-down       after its last action: other ranks still work
    data            how much of all this would vanish if every rank had its share of the batch immediately
    imbalance       how much of the rest would vanish if all actions of a kind took their mean time on every rank
    other           no known cause: a copy, or time between ops on the measured clock

A different schedule changes the first two and the cool-down, a faster link the communication, more workers the data,
and a better cut the imbalance. Data and imbalance are found by playing the step again, without loading and with
equal actions: the dependencies stay the same, and only the durations change.

    pieces    what each rank does, in order, and which communication it waits for before each piece
    played    when each piece would begin and end, given how long it takes
    causes    the gaps between the pieces, by cause, for the actual times and for equal ones
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline import metrics
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind

__all__ = ["CAUSES", "idle_by_cause"]

Array = npt.NDArray[Any]

CAUSES = ("warm-up", "message", "imbalance", "communication", "data", "cool-down", "other")
WARM_UP, MESSAGE, IMBALANCE, COMMUNICATION, DATA, COOL_DOWN, OTHER = range(len(CAUSES))


def idle_by_cause(timeline: Timeline) -> Array:
    """Return seconds by rank and cause, (ranks, causes), for the last complete step, within its makespan.

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
    causes = graph.causes(graph.play(1.0))
    if graph.loads:
        at_once = graph.causes(graph.play(1.0, data=False), data=False)
        at_once[:, DATA] = np.maximum(causes.sum(axis=1) - at_once.sum(axis=1), 0.0)
        causes = at_once
    equal = graph.causes(graph.play(0.0, data=False), data=False)
    equal[:, DATA] = causes[:, DATA]
    # The slowest rank would wait longer if all were equal: its idle time stays as it is.
    excess = causes.sum(axis=1) - equal.sum(axis=1)
    less = excess > 1e-12 * max(float(causes.sum()), 1e-30)
    causes[less] = equal[less]
    causes[less, IMBALANCE] = excess[less]
    return causes


@dataclass
class _Piece:
    """A part of an action that no wait interrupts.

    Attributes:
        rank: the rank that runs it.
        start, took: its start and its duration in seconds.
        usual: seconds that it would take if all actions of its kind took equally long.
        pause: seconds before it in which its rank did nothing known.
        data: seconds before it in which its rank got its share of the batch.
        needs: the communication that its rank waits for before it.
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
        issued: for each sender, when it issued the communication: the number of a piece, the fraction of the piece that
            is done by then, and the seconds after that; piece -1 means before all work, with the time itself.
        took: seconds from its beginning to its end.
    """

    issued: list[tuple[int, float, float]]
    took: float


class _Graph:
    """What each rank does, and what each of its pieces waits for.

    Args:
        spans: the spans of one step.
        world_size: the number of ranks.
    """

    def __init__(self, spans: Array, world_size: int) -> None:
        self._world_size = world_size
        work, waits = metrics.work(spans), spans[spans["kind"] == Kind.WAIT]
        data = metrics.loading(spans)
        self.loads = len(data) > 0
        begin = self._begin = metrics.extent(metrics.done(spans))[0]
        took = np.zeros(len(work))
        for rank in range(world_size):
            took[work["rank"] == rank] = metrics.worked(spans[spans["rank"] == rank])
        usual = {kind: float(took[work["kind"] == kind].mean()) for kind in np.unique(work["kind"]).tolist()}
        # ---- pieces, sorted by start, so that whatever a piece needs comes before it
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
        """Return a communication, with the points in its senders' work at which it was issued."""
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
        """Locate a time in a rank's work: a piece, the fraction of it that is done, and the seconds after it.

        Before all work of the rank, the piece is -1 and the seconds are the time itself.
        """
        at = int(np.searchsorted(self._starts[rank], time, side="right")) - 1
        if at > 0:  # the next piece may begin just as one ends: what is issued then belongs to the first
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
        """Play the pieces: return (piece, when its rank was free, when the last message it needs began, start, end) for
        each.

        Args:
            real: 1 for the actual times, 0 for equal ones.
            data: whether data has to be loaded or is there already.
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
        """Return seconds, (ranks, causes), of what was played with loading of data or without."""
        causes = np.zeros((self._world_size, len(CAUSES)))
        if not played:
            return causes
        begin = self._begin if data else min(p[3] for p in played)
        end = max(p[4] for p in played)
        last = np.full(self._world_size, np.nan)
        for piece, free, began, start, stop in played:
            rank = piece.rank
            causes[rank, DATA] += piece.data * data
            if np.isnan(last[rank]):
                causes[rank, WARM_UP] += start - begin - piece.data * data
            else:
                causes[rank, MESSAGE] += began - free
                causes[rank, COMMUNICATION] += start - piece.pause - began
                causes[rank, OTHER] += piece.pause
            last[rank] = stop
        causes[:, COOL_DOWN] = np.where(np.isnan(last), 0.0, end - last)
        causes[np.isnan(last), OTHER] = end - begin
        return causes


def _uninterrupted(action: Array, waits: Array) -> Iterator[tuple[float, float]]:
    """Yield the parts of an action during which its rank does not wait."""
    start, end = float(action["start"]), float(action["end"])
    for a, b in metrics.covered(_clipped(waits[waits["depth"] > 0], start, end)).tolist():
        if a > start:
            yield start, a
        start = b
    yield start, end


def _clipped(spans: Array, start: float, end: float) -> Array:
    """Return the spans that overlap the time between `start` and `end`, clipped to it."""
    cut = spans[(spans["start"] < end) & (spans["end"] > start)].copy()
    cut["start"], cut["end"] = np.maximum(cut["start"], start), np.minimum(cut["end"], end)
    return cut
