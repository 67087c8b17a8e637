"""Play: when each action of a schedule can run, on paper."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpkit.schedule.action import COMPUTE, Action
from mpkit.schedule.core import Schedule

__all__ = ["SLOTS", "Placed", "Played", "play"]

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
    rank_of, needs, together = schedule.stage_to_rank, schedule.needs, schedule.together
    lengths = {
        kind: [slot] * schedule.stages if isinstance(slot, int | float) else slot
        for kind, slot in (dict.fromkeys(COMPUTE, 0) | dict(slots)).items()
    }
    done: dict[Action, float] = {}  # when what an action made leaves its rank
    placed: list[Placed] = []
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    stuck: dict[int, tuple[Action, Action]] = {}
    rows = [[action for action in row if action.kind in COMPUTE] for row in schedule.rows]
    position = [0] * len(rows)
    free: list[float] = [0] * len(rows)
    held: list[Action | None] = [None] * len(rows)  # done, and leaves with what comes next
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        row = rows[rank]
        stuck.pop(rank, None)
        now = free[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            start = now
            missing = None
            for need in needs(action):
                at = now if need == held[rank] else done.get(need)
                if at is None:
                    missing = need
                    break
                if hop and rank_of[need.stage] != rank:
                    at += hop
                if at > start:
                    start = at
            if missing is not None:
                stuck[rank] = (action, missing)
                waiting[missing].append(rank)
                break
            now = start + lengths[action.kind][action.stage]
            placed.append(Placed(start, now, rank, action))
            position[rank] += 1
            before, held[rank] = held[rank], None
            if action in together and position[rank] < len(row):
                held[rank] = action
            else:
                done[action] = now
                ready.extend(waiting.pop(action, ()))
            if before is not None:
                done[before] = now
                ready.extend(waiting.pop(before, ()))
        free[rank] = now
    placed.sort()
    return Played(placed, stuck)
