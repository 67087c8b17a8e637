"""A played schedule as a Timeline: its spans, and the activations that it holds.

done     the actions of all ranks with their times, one column per field
spans    these actions, the messages between ranks, the waits for them and the recomputed forwards
held     activations, one for each micro-batch between its forward and its backward on a stage
after    what all ranks do when their micro-batches are done: collectives, and the optimizer
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.plan.schedule import Schedule
from mpkit.plan.schedule.play import TimedAction
from mpkit.timeline.replay.spans import HELD, SPAN
from mpkit.trace import CATEGORIES, Kind, Lane, lane_of

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline

__all__ = ["PlayedActions", "followed_by", "held_changes", "spans"]

Array = npt.NDArray[Any]

KIND = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRAD, "W": Kind.WEIGHT_GRAD}


class PlayedActions(NamedTuple):
    """The actions of all ranks, by rank in program order, in columns of shape (n,)."""

    rank: Array
    kind: Array  # Kind
    stage: Array
    microbatch: Array
    free: Array  # seconds, as in `mpkit.plan.schedule.play.TimedAction`
    start: Array
    end: Array
    left: Array

    @classmethod
    def from_rows(cls, rows: list[list[TimedAction]]) -> PlayedActions:
        """Make the columns from what `mpkit.plan.schedule.play.time_actions` returns."""
        ranks, actions, *times = zip(*(each for row in rows for each in row), strict=True)
        kinds, stages, microbatches = zip(*actions, strict=True)
        numbers = ranks, [KIND[kind] for kind in kinds], stages, microbatches
        return cls(*map(np.array, numbers), *(np.array(column, float) for column in times))


def spans(
    done: PlayedActions, schedule: Schedule, hop: float, again: Array, steps: int = 1
) -> tuple[Array, list[str]]:
    """Return the spans, (n,) of `SPAN`, by rank, then start, and the names that they refer to.

    Args:
        done: every action, once.
        schedule: the schedule that was played.
        hop: seconds per message.
        again: by stage, seconds to recompute the forward before its backward.
        steps: how many consecutive steps the schedule holds, each with the same number of micro-batches.
    """
    rank, kind, stage, m = done.rank, done.kind, done.stage, done.microbatch
    number = np.arange(len(rank))
    back = (kind == Kind.BACKWARD) | (kind == Kind.INPUT_GRAD)  # it receives a gradient and sends one
    sent, taker = _messages(done, schedule, back)
    left, group = done.left[sent], 1 + stage[sent] + schedule.stages * back[sent]
    waits = done.free[taker] + np.where(back[taker], again[stage[taker]], 0.0)
    redone = np.flatnonzero(back & (again[stage] > 0))
    redone_at = done.free[redone], done.free[redone] + again[stage[redone]]
    # A step lasts from a rank's first action to its last; the first step begins at 0.
    per = schedule.microbatches // steps
    every_step = np.divmod(np.arange(schedule.ranks * steps), steps)  # rank, step
    begins, ends = np.full((schedule.ranks, steps), np.inf), np.zeros((schedule.ranks, steps))
    np.minimum.at(begins, (rank, m // per), done.free)
    np.maximum.at(ends, (rank, m // per), done.end)
    step_at = np.minimum(begins, ends)[every_step], ends[every_step]
    # Spans of one rank with the same start are ordered by number.
    where, at_home, before = (stage[taker], m[taker]), (stage[sent], m[sent]), 8 * number
    parts = [
        _part(Kind.STEP, every_step[0], *step_at, -1, (-1, every_step[1] * per)),
        _part(Kind.RECV, rank[taker], left, left + hop, before[taker], where, peer=rank[sent], group=group),
        _part(Kind.RECOMPUTE, rank[redone], *redone_at, before[redone] + 1, (stage[redone], m[redone])),
        _part(Kind.WAIT, rank[taker], waits, done.start[taker], before[taker] + 2, where),
        _part(kind, rank, done.start, done.end, before + 3, (stage, m)),
        _part(Kind.SEND, rank[sent], left, left, before[sent] + 4, at_home, peer=rank[taker], group=group),
    ]
    whole = np.concatenate([part for part, _ in parts])
    order = np.lexsort((np.concatenate([at for _, at in parts]), whole["start"], whole["rank"]))
    row = np.empty(len(order), int)
    row[order] = np.arange(len(order))
    # A wait is caused by its receive, which has the same position among the receives as the wait among the waits.
    receives = schedule.ranks * steps
    waits_at = receives + len(sent) + len(redone)
    whole["cause"][waits_at : waits_at + len(sent)] = row[receives : receives + len(sent)]
    whole["step"], whole["microbatch"] = np.divmod(whole["microbatch"], per)
    whole["microbatch"][whole["kind"] == Kind.STEP] = -1
    return whole[order], ["", *_groups(schedule)]


def _messages(done: PlayedActions, schedule: Schedule, back: Array) -> tuple[Array, Array]:
    """Return the actions whose results are sent to another rank, and for each one the action that receives it there."""
    rank, stage, m = done.rank, done.stage, done.microbatch
    forward, holder = done.kind == Kind.FORWARD, np.array(schedule.stage_to_rank)
    to = np.where(forward, stage + 1, np.where(back, stage - 1, -1))
    sent = np.flatnonzero((to >= 0) & (to < len(holder)))
    sent = sent[holder[to[sent]] != rank[sent]]
    takers = np.zeros((2, len(holder), schedule.microbatches), int)
    for way, these in enumerate((forward, back)):
        takers[way, stage[these], m[these]] = np.arange(len(rank))[these]
    return sent, takers[back[sent].astype(int), to[sent], m[sent]]


def held_changes(done: PlayedActions) -> Array:
    """Return the changes in memory, (n,) of `HELD`: a micro-batch counts 1 from the start of its F to the end of its B
    or W.
    """
    adds, frees = done.kind == Kind.FORWARD, (done.kind == Kind.BACKWARD) | (done.kind == Kind.WEIGHT_GRAD)
    changes = np.flatnonzero(adds | frees)
    changed = np.zeros(len(changes), HELD)
    changed["rank"] = done.rank[changes]
    changed["time"] = np.where(adds[changes], done.start[changes], done.end[changes])
    changed["category"] = CATEGORIES.index("activations")
    changed["total"] = np.cumsum(np.where(adds[changes], 1, -1))  # a rank ends with 0
    return changed


def followed_by(timeline: Timeline, phases: Iterable[tuple[str, Kind, float]]) -> Timeline:
    """Return a timeline of one step whose ranks do some more, each when it is done with what it has done before.

    Args:
        timeline: the step.
        phases: in order: the name, the kind and the seconds. A collective of all ranks begins when the last has come.
    """
    spans, names = timeline.spans, list(timeline.names)
    ranks = np.arange(timeline.world_size)
    ends = np.array([spans["end"][spans["rank"] == rank].max(initial=0.0) for rank in ranks])
    parts = [spans]
    for name, kind, seconds in phases:
        names.append(name)
        collective = lane_of(kind) == Lane.COMM
        starts = np.full(len(ranks), ends.max()) if collective else ends
        part = _part(
            kind, ranks, starts, starts + seconds, 0, (-1, -1), name=np.full(len(ranks), len(names) - 1)
        )[0]
        if collective:
            part["issued"], part["group"] = ends, len(names) - 1
            wait = _part(Kind.WAIT, ranks, ends, starts + seconds, 0, (-1, -1))[0]
            wait["cause"] = sum(map(len, parts)) + ranks
            part = np.concatenate([part, wait])
        ends = starts + seconds
        parts.append(part)
    whole = np.concatenate(parts)
    whole["step"] = spans["step"].max(initial=0)
    steps = whole["kind"] == Kind.STEP
    whole["end"][steps] = ends[whole["rank"][steps]]
    order = np.argsort(whole["rank"], kind="stable")
    row = np.empty(len(order), int)
    row[order] = np.arange(len(order))
    caused = whole["cause"] >= 0
    whole["cause"][caused] = row[whole["cause"][caused]]
    return replace(timeline, spans=whole[order], names=names)


def _part(
    kind: Any, rank: Array, start: Any, end: Any, number: Any, where: Any, **columns: Array
) -> tuple[Array, Array]:
    """Return spans of one kind, and the number of each."""
    part = np.zeros(len(rank), SPAN)
    part["kind"], part["rank"], part["start"], part["end"], part["issued"] = kind, rank, start, end, start
    part["lane"] = lane_of(kind) if isinstance(kind, Kind) else lane_of(Kind.FORWARD)
    part["stage"], part["microbatch"] = where
    part["peer"], part["cause"] = -1, -1
    for name, column in columns.items():
        part[name] = column
    return part, np.broadcast_to(number, len(rank))


def _groups(schedule: Schedule) -> list[str]:
    """Name each stage's message, such as "0>1#F0": sender, receiver, outputs (F) or gradients
    (B), stage; "" if none.
    """
    holder = schedule.stage_to_rank
    ways = (("F", [*holder[1:], -1]), ("B", [-1, *holder[:-1]]))
    return [
        f"{rank}>{to}#{way}{stage}" if to not in (-1, rank) else ""
        for way, receivers in ways
        for stage, (rank, to) in enumerate(zip(holder, receivers, strict=True))
    ]
