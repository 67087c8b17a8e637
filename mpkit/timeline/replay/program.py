"""Program: one rank's ops on the axis of its own work, and from there on the clock.

A rank's compute lane either works or waits. The *work axis* counts the work alone: op i begins when `work[i]` seconds
of it are done, no matter how long the rank waited. That much is known as soon as an op is recorded. The *clock* adds
the waiting: each WAIT that really has to wait delays everything after it, so between two of them time = work + a
constant. Only communication and waits are processed one by one; the rest is arithmetic on whole arrays.
"""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from mpkit.common.arrays import Array
from mpkit.trace import OP, Kind

_WAIT, _COMM, _HOST, _STEP = int(Kind.WAIT), 32, 64, int(Kind.STEP)


class RankProgram:
    """One rank's ops, as far as they have been fed.

    `cost` returns the seconds of compute of (n,) of `OP`. `holds_steps`: a step's times are known when it is over, as a
    GPU's are; `includes_copies`: an action's time includes that of the copies inside it.
    """

    def __init__(self, cost: Callable[[Array], Array], holds_steps: bool, includes_copies: bool) -> None:
        self._cost, self._holds_steps, self._includes_copies = cost, holds_steps, includes_copies
        self._records = self.ops = np.empty(0, OP)  # all records, and those that were taken so far
        self.work = self.done = np.empty(0)  # seconds of work before each op and at its end
        # For each op, the first later op that is not inside it: the op ends after all waits before that one.
        self.close = np.empty(0, np.int64)
        self.total = 0.0  # total work
        # Each WAIT that had to wait: the op, then its end on the clock and on the work axis.
        self.pauses: list[tuple[int, float, float]] = [(-1, 0.0, 0.0)]
        self._step: tuple[int, int] | None = None  # op and number of the current step

    @property
    def count(self) -> int:
        """How many ops were taken."""
        return len(self.ops)

    @property
    def left(self) -> Array:
        """The records that could not be taken yet: (n,) of `OP`."""
        return self._records[self.count :]

    # ---- taking records

    def feed(self, ops: Array) -> None:
        """Store all records so far, of which those that were open may have ended by now."""
        self._records, self.ops = ops, ops[: self.count]

    def take(self, final: bool) -> slice:
        """Put the complete ops on the work axis; return which ops those are."""
        first = self.count
        stop = first + self._whole(final)
        self.ops = self._records[:stop]
        if stop > first:
            self._place(self.ops[first:], first)
        if final:
            self._end_step(stop)
        return slice(first, stop)

    def _whole(self, final: bool) -> int:
        """Count the records that can be taken now: those before the first that is still open.

        An action is taken once something after it has begun, since what is inside it may not have been read yet.
        """
        tail = self.left
        kind = tail["kind"]
        stays_open = ((kind >= _COMM) & (kind < _HOST)) | (kind == _STEP)
        is_open = np.flatnonzero((tail["end"] == 0) & ~stays_open)
        stop = int(is_open[0]) if len(is_open) else len(tail)
        if final:
            return stop
        if self._holds_steps and len(steps := np.flatnonzero(kind[:stop] == _STEP)):
            stop = int(steps[-1])
        for last in np.flatnonzero((kind[:stop] < _WAIT) & (tail["depth"][:stop] == 0))[-1:].tolist():
            if not (tail["start"][last + 1 :] >= tail["end"][last]).any():
                stop = last
        return stop

    def _place(self, ops: Array, first: int) -> None:
        kind, depth = ops["kind"], ops["depth"]
        here = np.arange(len(ops))
        # Ops inside an action: layers, and the communication and waits of layers.
        action = np.maximum.accumulate(np.where((kind < _COMM) & (depth == 0), here, -1))
        within = (action >= 0) & (here != action) & (kind[action] < _WAIT) & (kind < _STEP)
        within &= np.where(kind < _COMM, depth > 0, ops["start"] < ops["end"][action])
        # Actions, and copies between device and host, which also block their rank.
        copies = (kind >= _HOST) & (kind < _STEP)
        works = ((kind < _WAIT) & (depth == 0)) | (copies & ~within)
        cost = self._cost(ops)
        seconds = np.where(works, cost, 0.0)
        copied = np.where(copies & within, cost, 0.0) * (not self._includes_copies)
        if copied.any():  # copies inside an action lengthen it
            np.add.at(seconds, action[copied > 0], copied[copied > 0])
        # The order of summation is the same whether records arrive at once or in parts.
        sums = np.cumsum(np.concatenate([[self.total], seconds]))
        work, done, total = sums[:-1].copy(), sums[1:].copy(), float(sums[-1])
        close = here + 1
        if within.any():
            close = _closes(depth, kind < _COMM, within)
            self._place_within(ops, np.flatnonzero(within), action, close, seconds, copied, work, done)
        self.total = total
        self.work, self.done = np.concatenate([self.work, work]), np.concatenate([self.done, done])
        self.close = np.concatenate([self.close, close + first])
        self._find_steps(ops, first)

    @staticmethod
    def _place_within(
        ops: Array, inner: Array, action: Array, close: Array, seconds: Array, copied: Array, work: Array, done: Array
    ) -> None:  # fmt: skip
        """Divide an action's work among its layers in proportion to their wall time, less the waits.

        Copies are treated alike, unless they have times of their own, `copied`, which are added.
        """
        start, end, kind = ops["start"], ops["end"], ops["kind"]
        apart = (kind == _WAIT) | (copied > 0)
        waited = np.concatenate([[0], np.cumsum(np.where(apart, end - start, 0))])
        more = np.concatenate([[0.0], np.cumsum(copied)])
        outer = action[inner]
        busy = end[outer] - start[outer] - (waited[close[outer]] - waited[outer])
        own = np.maximum(seconds[outer] - (more[close[outer]] - more[outer]), 0.0)
        scale = np.where(busy > 0, own / np.maximum(busy, 1), 0.0)

        def map_time(wall: Array, index: Array) -> Array:
            share = (wall - start[outer] - (waited[index] - waited[outer])) * scale
            done: Array = work[outer] + np.clip(share, 0.0, own) + (more[index] - more[outer])
            return done

        lasts = (kind[inner] < _WAIT) | (kind[inner] >= _HOST)
        begin = map_time(start[inner], inner)
        finish = map_time(end[inner], close[inner])
        work[inner] = begin
        done[inner] = np.where(lasts, finish, begin)

    def _find_steps(self, ops: Array, first: int) -> None:
        """Find the steps among new ops: a step is over where the first op of another one begins."""
        step, position = ops["step"], 0
        while True:
            if self._step is not None:
                other = np.flatnonzero(step[position:] != self._step[1])
                if not len(other):
                    return
                position += int(other[0])
                self._end_step(first + position)
            steps = np.flatnonzero(ops["kind"][position:] == _STEP)
            if not len(steps):
                return
            position += int(steps[0])
            self._step = (first + position, int(step[position]))
            self.close[first + position] = np.iinfo(np.int64).max
            position += 1

    def _end_step(self, close: int) -> None:
        if self._step is not None:
            self.close[self._step[0]] = close
            self._step = None

    # ---- the clock

    @property
    def time(self) -> float:
        """Seconds on the clock at the end of everything taken, as far as they are known."""
        _, time, work = self.pauses[-1]
        return time + (self.total - work)

    def forget(self, before: int) -> None:
        """Drop the pauses that only ops before this one need."""
        del self.pauses[: max(0, bisect_left(self.pauses, (before,)) - 1)]

    def clock(self, work: Array, op: Array) -> Array:
        """Return seconds on the clock after that much work and all waits before `op`."""
        paused = np.array(self.pauses)
        which = np.maximum(np.searchsorted(paused[:, 0], op, side="left") - 1, 0)
        return paused[which, 1] + (work - paused[which, 2])  # type: ignore[no-any-return]


def _closes(depth: Array, computes: Array, within: Array) -> Array:
    """Return, for each op of the compute lane, the first op after it that is not inside it."""
    close = np.arange(len(depth)) + 1
    for level in np.unique(depth[computes]):
        # It ends at the next op of the compute lane that is no deeper, or at anything outside of the action.
        ends = np.flatnonzero(~within | (computes & (depth <= level)))
        mine = np.flatnonzero(computes & (depth == level))
        after = np.searchsorted(ends, mine, side="right")
        close[mine] = np.append(ends, len(depth))[after]
    return close
