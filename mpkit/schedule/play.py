"""Play: when each action of a schedule can run, on paper."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpkit.schedule.action import COMPUTE, Action

if TYPE_CHECKING:
    from mpkit.schedule.core import Schedule

__all__ = ["SLOTS", "Placed", "Played", "Timed", "play", "timed"]

SLOTS: Mapping[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""How long an action takes by default: a backward takes twice as long as a forward."""


class Placed(NamedTuple):
    """An action with its time."""

    start: float
    end: float
    rank: int
    action: Action


class Played(NamedTuple):
    """The result of `play`: the actions that could run, and by rank where it was stuck and on what."""

    placed: list[Placed]
    stuck: dict[int, tuple[Action, Action]]


class Timed(NamedTuple):
    """An action with all its times.

    Attributes:
        rank, action: the action, and the rank that runs it.
        free: when the rank got to it.
        start: when everything that it needs was there, so that it began.
        end: when it was done.
        left: when its result left the rank: its end, or the end of the action that it runs together with.
    """

    rank: int
    action: Action
    free: float
    start: float
    end: float
    left: float


def play(schedule: Schedule, slots: Mapping[str, float | Sequence[float]] = SLOTS, hop: float = 0) -> Played:
    """Run a schedule on paper: each rank runs its row in order, each action as soon as what it needs is there.

    If a schedule cannot finish, `stuck` gives, for each rank that did not, the action that it is at and the one that
    it waits for.

    Args:
        schedule: the schedule; messages in it are ignored.
        slots: how long an action takes, by kind: a number, or one per stage.
        hop: how long a result takes to get from one rank to another.

    >>> from mpkit.schedule import Schedule
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
    """Play a schedule as `play` does; return all times of each action, by rank in program order, and the stuck ranks.

    Args:
        schedule, slots, hop: as for `play`.
        again: by stage, how long recomputing its forward takes before a backward; it does not wait for the gradient.
    """
    rank_of, needs, together = schedule.stage_to_rank, schedule.needs, schedule.together
    lengths = {kind: _by_stage(slots.get(kind, 0), schedule.stages) for kind in COMPUTE}
    rows = [[action for action in row if action.kind in COMPUTE] for row in schedule.rows]
    left: dict[Action, float] = {}
    times: list[list[Timed]] = [[] for _ in rows]
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    stuck: dict[int, tuple[Action, Action]] = {}

    def run(rank: int) -> Iterator[Action]:
        """Run what can be run of a rank's row, and yield the actions whose results have left it."""
        row, done = rows[rank], times[rank]
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
    return times, stuck


def _by_stage(slot: float | Sequence[float], stages: int) -> Sequence[float]:
    return [slot] * stages if isinstance(slot, int | float) else slot
