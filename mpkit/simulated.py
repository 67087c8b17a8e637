"""What a schedule that was played comes to as a Timeline: its spans, and the activations that it holds.

done     the actions of all ranks with their times, a column each
spans    these, the messages between ranks, the waits for them and the forwards that are done again
held     activations, one for each micro-batch that a stage has seen forward and not yet backward
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpkit.schedule import Schedule
from mpkit.schedule.play import Timed
from mpkit.timeline import HELD, SPAN
from mpkit.trace import CATEGORIES, Kind, lane_of

__all__ = ["Done", "held", "spans"]

Array = npt.NDArray[Any]

KIND = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRAD, "W": Kind.WEIGHT_GRAD}


class Done(NamedTuple):
    """The actions of all ranks, by rank in program order: a column each, (n,)."""

    rank: Array
    kind: Array  # Kind
    stage: Array
    microbatch: Array
    free: Array  # seconds, as in `mpkit.schedule.play.Timed`
    start: Array
    end: Array
    left: Array

    @classmethod
    def of(cls, rows: list[list[Timed]]) -> Done:
        """Of what `mpkit.schedule.play.timed` found."""
        ranks, actions, *times = zip(*(each for row in rows for each in row), strict=True)
        kinds, stages, microbatches = zip(*actions, strict=True)
        numbers = ranks, [KIND[kind] for kind in kinds], stages, microbatches
        return cls(*map(np.array, numbers), *(np.array(column, float) for column in times))


def spans(
    done: Done, schedule: Schedule, hop: float, again: Array, steps: int = 1
) -> tuple[Array, list[str]]:
    """(n,) of `SPAN`, by rank, then start; and the names that they refer to.

    Args:
        done: each action once.
        schedule: what was played.
        hop: seconds that a message takes.
        again: by stage, seconds of a forward that is done again before its backward.
        steps: how many of them the schedule is, one after the other, each of as many micro-batches.
    """
    rank, kind, stage, m = done.rank, done.kind, done.stage, done.microbatch
    holder, number = np.array(schedule.stage_to_rank), np.arange(len(rank))
    back = (kind == Kind.BACKWARD) | (kind == Kind.INPUT_GRAD)  # a gradient comes to it, and one leaves

    # Messages: what leaves for another rank, and the action that takes it there.
    to = np.where(kind == Kind.FORWARD, stage + 1, np.where(back, stage - 1, -1))
    sent = np.flatnonzero((to >= 0) & (to < len(holder)))
    sent = sent[holder[to[sent]] != rank[sent]]
    takers = np.zeros((2, len(holder), schedule.microbatches), int)
    for way, these in enumerate((kind == Kind.FORWARD, back)):
        takers[way, stage[these], m[these]] = number[these]
    taker = takers[back[sent].astype(int), to[sent], m[sent]]
    left, peer, group = done.left[sent], {"peer": rank[taker]}, 1 + stage[sent] + len(holder) * back[sent]
    waits = done.free[taker] + np.where(back[taker], again[stage[taker]], 0.0)
    redone = np.flatnonzero(back & (again[stage] > 0))
    redone_at = done.free[redone], done.free[redone] + again[stage[redone]]
    # Steps: on a rank from its first action to its last; the first from 0.
    per = schedule.microbatches // steps
    step_of = (
        np.arange(schedule.ranks * steps) // steps,
        np.arange(schedule.ranks * steps) % steps,
    )  # rank, step
    begins, ends = np.full((schedule.ranks, steps), np.inf), np.zeros((schedule.ranks, steps))
    np.minimum.at(begins, (rank, m // per), done.free)
    np.maximum.at(ends, (rank, m // per), done.end)

    # What is on one rank at one time is in the order of its number.
    where, before = (stage[taker], m[taker]), 8 * number
    parts = [
        _part(
            Kind.STEP,
            step_of[0],
            np.minimum(begins, ends)[step_of],
            ends[step_of],
            -1,
            (-1, step_of[1] * per),
        ),
        _part(Kind.RECV, rank[taker], left, left + hop, before[taker], where, peer=rank[sent], group=group),
        _part(Kind.RECOMPUTE, rank[redone], *redone_at, before[redone] + 1, (stage[redone], m[redone])),
        _part(Kind.WAIT, rank[taker], waits, done.start[taker], before[taker] + 2, where),
        _part(kind, rank, done.start, done.end, before + 3, (stage, m)),
        _part(
            Kind.SEND, rank[sent], left, left, before[sent] + 4, (stage[sent], m[sent]), **peer, group=group
        ),
    ]
    whole = np.concatenate([part for part, _ in parts])
    order = np.lexsort((np.concatenate([at for _, at in parts]), whole["start"], whole["rank"]))
    row = np.empty(len(order), int)
    row[order] = np.arange(len(order))
    # A wait is for its receive, which is as far from the receives' beginning as it is from the waits'.
    receives = schedule.ranks * steps
    waits_at = receives + len(sent) + len(redone)
    whole["cause"][waits_at : waits_at + len(sent)] = row[receives : receives + len(sent)]
    whole["step"], whole["microbatch"] = np.divmod(whole["microbatch"], per)
    whole["microbatch"][whole["kind"] == Kind.STEP] = -1
    return whole[order], ["", *_groups(schedule)]


def held(done: Done) -> Array:
    """(n,) of `HELD`: from the start of an F to the end of its B, or W, a 1."""
    adds, frees = done.kind == Kind.FORWARD, (done.kind == Kind.BACKWARD) | (done.kind == Kind.WEIGHT_GRAD)
    changes = np.flatnonzero(adds | frees)
    found = np.zeros(len(changes), HELD)
    found["rank"] = done.rank[changes]
    found["time"] = np.where(adds[changes], done.start[changes], done.end[changes])
    found["category"] = CATEGORIES.index("activations")
    found["total"] = np.cumsum(np.where(adds[changes], 1, -1))  # a rank ends with 0
    return found


def _part(
    kind: Any, rank: Array, start: Any, end: Any, number: Any, where: Any, **columns: Array
) -> tuple[Array, Array]:
    """Spans of a kind, and the number of each."""
    part = np.zeros(len(rank), SPAN)
    part["kind"], part["rank"], part["start"], part["end"], part["issued"] = kind, rank, start, end, start
    part["lane"] = lane_of(kind) if isinstance(kind, Kind) else lane_of(Kind.FORWARD)
    part["stage"], part["microbatch"] = where
    part["peer"], part["cause"] = -1, -1
    for name, column in columns.items():
        part[name] = column
    return part, np.broadcast_to(number, len(rank))


def _groups(schedule: Schedule) -> list[str]:
    """What messages are of, such as "0>1#F0": from rank to rank, outputs or gradients, of the stage; "" if of none."""
    holder = schedule.stage_to_rank
    ways = (("F", [*holder[1:], -1]), ("B", [-1, *holder[:-1]]))
    return [
        f"{rank}>{to}#{way}{stage}" if to not in (-1, rank) else ""
        for way, receivers in ways
        for stage, (rank, to) in enumerate(zip(holder, receivers, strict=True))
    ]
