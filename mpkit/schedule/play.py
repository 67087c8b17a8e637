"""Play: when each action of a schedule can run, on paper."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mpkit.schedule.action import COMPUTE, Action
from mpkit.schedule.core import Schedule

__all__ = ["SLOTS", "Placed", "Played", "Timed", "play", "timed"]

SLOTS: Mapping[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""How long an action takes where nothing better is known: a backward is twice a forward."""


class Placed(NamedTuple):
    """An action with its time."""

    start: float
    end: float
    rank: int
    action: Action


class Played(NamedTuple):
    """What `play` found: the actions that could run, and by rank where it was stuck and on what."""

    placed: list[Placed]
    stuck: dict[int, tuple[Action, Action]]


class Timed(NamedTuple):
    """An action with all its times.

    Attributes:
        rank, action: who does what.
        free: when the rank came to it.
        start: when all that it needs was there, and it began.
        end: when it was done.
        left: when what it made left the rank: its end, or that of the action that it is together with.
    """

    rank: int
    action: Action
    free: float
    start: float
    end: float
    left: float


def play(schedule: Schedule, slots: Mapping[str, float | Sequence[float]] = SLOTS, hop: float = 0) -> Played:
    """Run a schedule on paper: each rank does its row in order, each action as soon as what it needs is there.

    Of a schedule that cannot finish, `stuck` says for each rank that did not the action it is at and the one it
    waits for.

    Args:
        schedule: its messages, if it has any, are passed over.
        slots: how long an action takes, by kind: a number, or one a stage.
        hop: how long it takes until what one rank made is on another.

    >>> play(Schedule(["0F0 0B0", "1F0 1B0"])).placed
    [Placed(start=0, end=1, rank=0, action=0F0), Placed(start=1, end=2, rank=1, action=1F0),
     Placed(start=2, end=4, rank=1, action=1B0), Placed(start=4, end=6, rank=0, action=0B0)]
    """
    rows, stuck = timed(schedule, slots, hop)
    placed = [Placed(t.start, t.end, t.rank, t.action) for row in rows for t in row]
    placed.sort()
    return Played(placed, stuck)


def timed(
    schedule: Schedule,
    slots: Mapping[str, float | Sequence[float]] = SLOTS,
    hop: float = 0,
    again: Sequence[float] = (),
) -> tuple[list[list[Timed]], dict[int, tuple[Action, Action]]]:
    """What `play` finds, by rank in program order, with all the times of each action; and who is stuck.

    Args:
        schedule, slots, hop: as of `play`.
        again: by stage, how long its forward takes anew before a backward; it does not wait for the gradient.
    """
    rank_of, needs, together = schedule.stage_to_rank, schedule.needs, schedule.together
    lengths = {kind: _by_stage(slots.get(kind, 0), schedule.stages) for kind in COMPUTE}
    rows = [[action for action in row if action.kind in COMPUTE] for row in schedule.rows]
    left: dict[Action, float] = {}
    found: list[list[Timed]] = [[] for _ in rows]
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    stuck: dict[int, tuple[Action, Action]] = {}

    def run(rank: int) -> Iterator[Action]:
        """Do what can be done of a rank's row; yields what has left it."""
        row, done = rows[rank], found[rank]
        now = done[-1].end if done else 0
        for action in row[len(done) :]:
            kind, stage, _ = action
            held = done[-1].action if done and done[-1].action in together else None
            free = start = now
            if again and kind in "BI":
                start += again[stage]
            for need in needs(action):
                at = now if need == held else left.get(need)
                if at is None:
                    stuck[rank] = action, need
                    waiting[need].append(rank)
                    return
                if rank_of[need.stage] != rank:
                    at += hop
                if at > start:
                    start = at
            now = start + lengths[kind][stage]
            done.append(Timed(rank, action, free, start, now, now))
            if held is not None:
                done[-2] = done[-2]._replace(left=now)
                left[held] = now
                yield held
            if action not in together or len(done) == len(row):
                left[action] = now
                yield action

    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        stuck.pop(rank, None)
        for action in run(rank):
            if action in waiting:
                ready.extend(waiting.pop(action))
    return found, stuck


def _by_stage(slot: float | Sequence[float], stages: int) -> Sequence[float]:
    return [slot] * stages if isinstance(slot, int | float) else slot
