"""Simulation: a schedule as the records that its ranks would make, replayed on the clock of `mpkit.timeline.replay`.

_records       one rank's row, with its sends, receives and waits, as a training would record it
simulate       these records, replayed on a device that does a second of work per second
followed_by    what all ranks do when their micro-batches are done: collectives, and the optimizer
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isfinite
from typing import Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.tracebacks import public
from mpkit.devices.hardware import Device, Hardware, Link
from mpkit.plan.kinds import every, whole
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Action, Schedule, lower
from mpkit.plan.schedule.play import BESIDE, COMPUTE
from mpkit.timeline.replay import SPAN, Replay
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES, MEMORY, OP, Kind, Lane, RankTrace, lane_of

Times = float | Sequence[float]

UNIT = Device("one second of work per second", {"float32": 1.0}, bandwidth=inf)
KIND = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRAD, "W": Kind.WEIGHT_GRAD}
COLUMNS = ("kind", "lane", "stage", "microbatch", "step", "group", "number", "peer", "ref", "flops")


@public
def simulate(
    plan: Plan | Schedule,
    forward: Times = 1.0,
    input_grad: Times = 1.0,
    weight_grad: Times = 1.0,
    hop: float = 0.0,
    *,
    backward: Times | None = None,
    beside: Times | None = None,
    steps: int = 1,
) -> Timeline:
    """Simulate when each action of a plan's schedule would happen.

    Args:
        plan: a plan, for its schedule and its degrees, or a schedule.
        forward: seconds per forward, one number or one per stage.
        input_grad: seconds for the gradients of the inputs, likewise. A backward that is not split takes
            `input_grad + weight_grad`.
        weight_grad: seconds for the gradients of the weights, likewise.
        hop: seconds per message from stage to stage; only its receiver waits for it.
        backward: seconds per backward that is not split, likewise, if that is not the sum of its halves.
        beside: seconds that a forward adds to a backward with which it runs as one (F & B), if less than `forward`.
        steps: the number of consecutive steps; a rank begins a step when it is done with its part of the previous one.

    Returns:
        a Timeline on the clock "simulated". Its memory counts activations: 1 "byte" for each micro-batch on a stage,
        from the start of its forward to the end of its backward (of `W` if the backward is split).

    Raises:
        ValueError: a time is negative or infinite, or the number of times differs from the number of stages.

    >>> t = simulate(Plan.gpipe(4, 8))
    >>> t.step_time, t.idle, t.bubble
    (33.0, [9.0, 9.0, 9.0, 9.0], 0.2727272727272727)
    >>> t = simulate(Plan(pp=4, schedule="zbv", microbatches=8, virtual_stages=2))
    >>> t.step_time, [peak["activations"] for peak in t.peak_memory]
    (51.0, [8, 8, 8, 8])
    """
    if isinstance(plan, Schedule):
        plan = Plan.from_schedule(plan)
    if not isinstance(plan, Plan):
        raise ValueError(f"simulate({plan!r}): give a Plan, such as simulate(Plan.gpipe(4, 8))")
    if (whole(steps) or 0) < 1:
        raise ValueError(f"steps={steps!r}: a whole number, 1 or more, such as steps=3")
    schedule = plan.build()
    given = {"forward": forward, "input_grad": input_grad, "weight_grad": weight_grad}
    f, i, w = (by_stage(name, value, schedule.stages) for name, value in given.items())
    took = {"F": f, "I": i, "W": w, "B": whole_backward(backward, i, w)}
    took[BESIDE] = f if beside is None else by_stage("beside", beside, schedule.stages)
    again = [time / k if (k := every(plan.recompute)) else 0.0 for time in f]
    link = Link("hop", time_of("hop", hop), inf)
    player = Replay(schedule.ranks, Hardware("simulated", UNIT, link, per_node=schedule.ranks))
    for rank, row in enumerate(lower(schedule).rows):
        player.feed(rank, _records(schedule, rank, row, took, again, steps))
    player.finish()
    played = player.collect()
    played.clock, played.notes = "simulated", []
    played.meta = {"plan": plan.to_json(), "schedule": schedule.name}
    played.spans["flops"] = 0.0  # of a device that does one per second
    return Timeline.from_replay(played)


def _records(
    schedule: Schedule, rank: int, row: Sequence[Action], took: dict[str, list[float]], again: list[float], steps: int
) -> RankTrace:  # fmt: skip
    """Return what a rank would record that runs its row with messages (`lower`) `steps` times.

    An op's FLOPs are its seconds, since the device does one per second. Op i lasts from 2i + 1 to 2i + 2 on the wall
    clock, on which only the order of memory depends. `took` has the seconds by kind of action, then by stage; `again`,
    by stage, those of a forward that is computed again.
    """
    holders, per_step = schedule.stage_to_rank, schedule.microbatches
    computed = [action for action in row if action.kind in COMPUTE]
    beside = {one for one, after in pairwise(computed) if one in schedule.together and one[1:] != after[1:]}
    ops: list[tuple[Any, ...]] = []
    held: list[tuple[int, int, int]] = []  # time, ops begun by then, change
    names = {"": 0}
    received: dict[tuple[str, int, int], int] = {}

    def add(
        kind: Kind, step: int, stage: int = -1, m: int = -1, seconds: float = 0.0, *, group: str = "", peer: int = -1,
        ref: int = -1,
    ) -> None:  # fmt: skip
        number = step * per_step + m if group else -1
        line = names.setdefault(group, len(names))
        ops.append((kind, lane_of(kind), stage, m, step, line, number, peer, ref, seconds))

    for step in range(steps):
        add(Kind.STEP, step)
        for action in row:
            kind, stage, m = action
            if kind.startswith("SEND"):
                to = holders[stage + (1 if kind == "SEND_F" else -1)]
                add(Kind.SEND, step, stage, m, group=f"{rank}>{to}#{kind[-1]}{stage}", peer=to)
            elif kind.startswith("RECV"):
                sender = stage + (-1 if kind == "RECV_F" else 1)
                received[kind[-1], stage, m] = len(ops)
                source = holders[sender]
                add(Kind.RECV, step, stage, m, group=f"{source}>{rank}#{kind[-1]}{sender}", peer=source)
            else:
                if kind in "BI" and again[stage]:  # needs no gradient, and so does not wait for it
                    add(Kind.RECOMPUTE, step, stage, m, again[stage])
                message = None if kind == "W" else received.pop(("F" if kind == "F" else "B", stage, m), None)
                if message is not None:
                    add(Kind.WAIT, step, stage, m, ref=message)
                add(KIND[kind], step, stage, m, took[BESIDE if action in beside else kind][stage])
                if kind != "I":  # activations live from the start of F to the end of B or W
                    held.append((2 * len(ops) - (kind == "F"), len(ops), 1 if kind == "F" else -1))
    return RankTrace(*_tables(ops, held), list(names))


def _tables(ops: list[tuple[Any, ...]], held: list[tuple[int, int, int]]) -> tuple[Array, Array]:
    """Return rows of numbers as (n,) of `OP` and (m,) of `MEMORY`."""
    table, memory = np.zeros(len(ops), OP), np.zeros(len(held), MEMORY)
    for column, values in zip(COLUMNS, zip(*ops, strict=True), strict=True):
        table[column] = values
    table["start"] = 2 * np.arange(len(ops)) + 1
    table["end"] = table["start"] + 1
    memory["time"], memory["op"], memory["delta"] = zip(*held, strict=True)
    memory["category"] = CATEGORIES.index("activations")
    return table, memory


# ---- times as they are given


def whole_backward(backward: Times | None, i: Sequence[float], w: Sequence[float]) -> list[float]:
    """Return the seconds per backward that is not split, by stage: as given, or the sum of its halves."""
    if backward is None:
        return [a + b for a, b in zip(i, w, strict=True)]
    return by_stage("backward", backward, len(i))


def by_stage(name: str, value: object, stages: int) -> list[float]:
    """Return seconds per stage, from one number or one per stage; a ValueError says which number is wrong."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [time_of(name, value)] * stages
    given = [time_of(name, each) for each in value]
    if len(given) != stages:
        raise ValueError(
            f"{name}={given} names {len(given)} times for {stages} stages. Give one number for all stages, "
            f"{name}=1.0, or one per stage, {name}={[1.0] * stages}."
        )
    return given


def time_of(name: str, value: object) -> float:
    """Return seconds as a float; a ValueError for anything but a finite number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ValueError(f"{name}={value!r}: a time is a number of seconds, such as {name}=1.0")
    if not isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r}: a time is finite and not negative, such as {name}=1.0")
    return float(value)


# ---- what follows the micro-batches


def followed_by(timeline: Timeline, phases: Iterable[tuple[str, Kind, float]]) -> Timeline:
    """Return the timeline of one step with more phases (name, kind, seconds) behind it, on all ranks.

    A rank begins a phase when it is done with the one before; a collective begins when the last rank has come.
    """
    spans, names = timeline.spans, list(timeline.names)
    ranks = np.arange(timeline.world_size)
    ends = np.array([spans["end"][spans["rank"] == rank].max(initial=0.0) for rank in ranks])
    parts = [spans]
    for name, kind, seconds in phases:
        names.append(name)
        collective = lane_of(kind) == Lane.COMM
        part = np.zeros(len(ranks), SPAN)
        part["kind"], part["lane"], part["rank"], part["name"] = kind, lane_of(kind), ranks, len(names) - 1
        part["stage"] = part["microbatch"] = part["peer"] = part["cause"] = -1
        part["issued"], part["start"] = ends, ends.max() if collective else ends
        part["end"] = part["start"] + seconds
        parts.append(part)
        if collective:
            wait = part.copy()
            wait["kind"], wait["lane"], wait["name"], wait["start"] = Kind.WAIT, lane_of(Kind.WAIT), 0, ends
            wait["cause"] = sum(map(len, parts[:-1])) + ranks
            part["group"] = len(names) - 1
            parts.append(wait)
        ends = part["end"]
    table = np.concatenate(parts)
    table["step"] = spans["step"].max(initial=0)
    steps = table["kind"] == Kind.STEP
    table["end"][steps] = ends[table["rank"][steps]]
    order = np.argsort(table["rank"], kind="stable")
    row = np.full(len(order) + 1, -1)  # the last one is row -1: no cause
    row[order] = np.arange(len(order))
    table["cause"] = row[table["cause"]]
    return replace(timeline, spans=table[order], names=names)
