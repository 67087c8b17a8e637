"""Improve: small changes to a schedule, kept if they do not make it longer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from mpkit.plan.schedule.action import Action
from mpkit.plan.schedule.activations import live
from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.play import time_actions

__all__ = ["improve", "span"]


def span(
    schedule: Schedule, slots: Mapping[str, Sequence[float]], hop: float, again: Sequence[float] = ()
) -> float:
    """Return the seconds from the first action of any rank to the end of the last; infinite if it does not finish.

    Args:
        schedule, slots, hop, again: as for `mpkit.plan.schedule.play.time_actions`.
    """
    rows, stuck = time_actions(schedule, slots, hop, again)
    if stuck:
        return float("inf")
    return max(row[-1].end for row in rows if row) - min(row[0].start for row in rows if row)


def improve(
    schedule: Schedule,
    measure: Callable[[Schedule], float],
    max_live: Sequence[float],
    activation: Sequence[float],
    random: Random,
    tries: int,
    enough: float,
) -> Schedule:
    """Move actions within their rows, one or a few at a time; the next try begins from whatever is not worse.

    1. Take an action of some row, and move it up to 8 places earlier or later.
    2. For each stage and micro-batch the order stays F, I, W, and no rank holds more than it may.
    3. Keep the change if the schedule is no longer than before; keeping equally long ones leads out of dead ends.

    Args:
        schedule: a valid schedule.
        measure: a function from a schedule to its length, which is infinite if it does not finish.
        max_live: by rank, how much it may hold.
        activation: by stage, how much it holds per micro-batch.
        random: the source of random changes.
        tries: the number of tries.
        enough: the length at which to stop, since no schedule is shorter.
    """
    best, shortest = schedule, measure(schedule)
    for _ in range(tries):
        if shortest <= enough:
            break
        rows = list(best.rows)
        for _ in range(random.choice((1, 1, 2, 3))):
            rank = random.randrange(len(rows))
            moved = _move_action(rows[rank], random)
            if moved is not None and max(live(moved, activation)) <= max_live[rank]:
                rows[rank] = moved
        if tuple(rows) == best.rows:
            continue
        tried = Schedule(rows, best.name, best.stage_to_rank, best.together)
        length = measure(tried)
        if length <= shortest:
            best, shortest = tried, length
    return best


def _move_action(row: tuple[Action, ...], random: Random) -> tuple[Action, ...] | None:
    """Move one action elsewhere in the row; None if its stage's order for the micro-batch forbids that."""
    if len(row) < 2:
        return None
    here = random.randrange(len(row))
    there = min(max(here + random.randint(-8, 8), 0), len(row) - 1)
    between = row[there:here] if there < here else row[here + 1 : there + 1]
    action = row[here]
    if there == here or any(other[1:] == action[1:] for other in between):
        return None
    rest = row[:here] + row[here + 1 :]
    return (*rest[:there], action, *rest[there:])
