"""Lowering: a schedule of compute becomes one with sends and receives."""

from __future__ import annotations

from bisect import bisect_left

from mpkit.plan.schedule.action import Action
from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.play import play

__all__ = ["lower"]


HOP = 1 / 1024
"""The time that a message takes on paper, so that a stage starts slightly after the previous one."""


def lower(schedule: Schedule) -> Schedule:
    """Add the sends and receives that a valid schedule of compute needs; stages on the same rank need none.

    1. Play the schedule on paper. Each message belongs to the instant t at which its content is computed. Actions
       that run together send together: then t is when both are done.
    2. The SEND goes where its rank is at t: right after the action that made the message.
    3. The RECV goes before the action that its rank runs at t. It is posted when the message is sent, so that the
       message travels during that action, and not much earlier, since its buffer takes memory.

    So the messages between two ranks, in both directions, are in the same order in both rows, that of t. That makes
    the result safe on NCCL, which matches messages by order and not by name; Gloo matches by name, in any order.

    >>> for row in lower(Schedule(["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"])).rows:
    ...     print(*row)
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0RECV_B0 0B1 0B0
    1RECV_F0 1RECV_F1 1F0 1F1 1B1 1SEND_B1 1B0 1SEND_B0
    """
    placed = play(schedule, hop=HOP)
    busy: list[list[tuple[float, float]]] = [[] for _ in schedule.rows]
    for each in placed:
        busy[each.rank].append((each.start, each.end))
    rows: list[list[tuple[tuple[float, int, float], Action]]] = [[] for _ in schedule.rows]
    for start, _, rank, action, made in placed:
        rows[rank].append(((start, 1, start), action))
        if message := _message(schedule, action):
            send, receive = message
            receiver = schedule.stage_to_rank[receive.stage]
            rows[rank].append(((made, 0, made), send))
            rows[receiver].append(((_began_at(busy[receiver], made), 0, made), receive))
    in_order = [[action for _, action in sorted(row, key=lambda entry: entry[0])] for row in rows]
    return Schedule(in_order, schedule.name, schedule.stage_to_rank, schedule.together)


def _began_at(busy: list[tuple[float, float]], t: float) -> float:
    """Return when a rank began what it does at time t; t itself if it is idle or about to begin."""
    before = bisect_left(busy, (t, t)) - 1
    if before < 0:
        return t
    start, end = busy[before]
    return start if end > t else t


def _message(schedule: Schedule, action: Action) -> tuple[Action, Action] | None:
    """Return the send and the receive that follow an action, or None if its result stays on its rank."""
    if action.kind == "F":
        way, to = "F", action.stage + 1
    elif action.kind in ("B", "I"):
        way, to = "B", action.stage - 1
    else:
        return None
    holders = schedule.stage_to_rank
    if not 0 <= to < schedule.stages or holders[to] == holders[action.stage]:
        return None
    m = action.microbatch
    return Action(f"SEND_{way}", action.stage, m), Action(f"RECV_{way}", to, m)
