"""StepGraph: the pieces of a step, and what each of them had to wait for.

A piece begins when the last of those that it needs has ended. So the step can be played again with other durations:
what does not change is who waits for whom, and the order in which each rank works.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Node(IntEnum):
    """What a piece is."""

    WORK = 0  # of an action, a copy or a load
    WAIT = 1  # a point at which a rank waits; it takes no time of its own
    READY = (
        2  # a message was sent, or the last member of a collective has come; or the time until one is issued
    )
    TRANSFER = 3  # communication, once it was ready
    GAP = 4  # a rank does nothing known before its next operation: on a GPU, the host has not launched it
    BEFORE = 5  # a rank is not in this step yet


@dataclass
class StepGraph:
    """The pieces of one step, n of them, each after all that it needs.

    Attributes:
        kind: (n,) `Node`.
        rank: (n,) the rank of each; of READY, the rank that came last.
        row: (n,) the row of its span in the step's spans; of a GAP the operation after it; -1: none.
        took: (n,) seconds.
        needs: for each, the numbers of those it waits for.
        begin: seconds on the timeline's clock at which the step begins.
        end: (n,) seconds at which each ended, as recorded.
    """

    kind: Array
    rank: Array
    row: Array
    took: Array
    needs: list[tuple[int, ...]]
    begin: float
    end: Array
    world_size: int = 1
    of_row: dict[int, list[int]] = field(default_factory=dict)

    @cached_property
    def ends(self) -> Array:
        """(n,) seconds from the step's begin at which each ends, played with the recorded durations."""
        return self.play(self.took)

    @property
    def step_time(self) -> float:
        """Seconds of the step."""
        return float(self.ends.max(initial=0.0))

    def play(
        self,
        took: Array | Sequence[float],
        *,
        without: Collection[int] = (),
    ) -> Array:
        """Return (n,) seconds from the step's begin at which each piece ends if they take so long.

        Args:
            took: (n,) seconds.
            without: pieces that nobody waits for any more.
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
        """Return the seconds of the step if its pieces take so long."""
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

        Where several end at the same moment, the rank's own goes before those of others.
        """
        if not len(self.needs):
            return []
        ends = self.ends
        at, found = int(np.argmax(ends)), []
        while True:
            found.append(at)
            needs = self.needs[at]
            if not needs:
                return found[::-1]
            at = max(needs, key=lambda need: (ends[need], self.rank[need] == self.rank[at]))

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
        """Return when the communication that a piece waits for was ready, and when it had arrived; 0 if there is none.

        Args:
            piece: a WAIT, or a GAP that began with one.
            ends: (n,) seconds at which each piece ends, as played.
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
