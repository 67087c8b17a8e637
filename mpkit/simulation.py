"""Simulation: a schedule on the clock, without processes.

The schedule, with its sends and receives, is written down as the Trace that its ranks would leave, and goes through
the same replay as a real run's. Memory counts activations, one for each micro-batch that a stage has seen
forward and not yet backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite

import numpy as np

from mpkit.devices import Device, Hardware, Link
from mpkit.plan import Plan
from mpkit.replay.core import Replay
from mpkit.schedule import Action, Schedule, build, lower
from mpkit.timeline import Timeline
from mpkit.trace import CATEGORIES, MEMORY, OP, Kind, RankTrace, lane_of

__all__ = ["simulate"]

Times = float | Sequence[float]

Row = tuple[
    int, int, int, float, int, int, int, int
]  # kind, stage, microbatch, time, group, number, peer, ref

KIND = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRAD, "W": Kind.WEIGHT_GRAD}


def simulate(
    plan: Plan,
    forward: Times = 1.0,
    input_grad: Times = 1.0,
    weight_grad: Times = 1.0,
    hop: float = 0.0,
) -> Timeline:
    """When each action of a plan's schedule would happen.

    Args:
        plan: its schedule and its degrees.
        forward: seconds a forward takes, one number or one a stage.
        input_grad: seconds the gradients of the inputs take, likewise. A backward that is not split takes
            `input_grad + weight_grad`.
        weight_grad: seconds the gradients of the weights take, likewise.
        hop: seconds a message takes from stage to stage; nobody waits for it but its receiver.

    Returns:
        a Timeline on the clock "simulated". Its memory counts activations: 1 "byte" for each micro-batch of a stage,
        from the start of its forward to the end of its backward (of `W` where that is split).

    Raises:
        ValueError: times that are negative, infinite, or of another number than there are stages.

    >>> t = simulate(Plan.gpipe(4, 8))
    >>> t.makespan, t.idle, t.bubble
    (33.0, [9.0, 9.0, 9.0, 9.0], 0.2727272727272727)
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"simulate({plan!r}): give a Plan, such as simulate(Plan.gpipe(4, 8))")
    schedule = build(plan)
    times = {
        name: _by_stage(name, value, schedule.stages)
        for name, value in (("forward", forward), ("input_grad", input_grad), ("weight_grad", weight_grad))
    }
    _check("hop", hop)
    seconds = {
        "F": times["forward"],
        "I": times["input_grad"],
        "W": times["weight_grad"],
        "B": [i + w for i, w in zip(times["input_grad"], times["weight_grad"], strict=True)],
        "R": times["forward"] if plan.recompute == "full" else [0.0] * schedule.stages,
    }
    # An op's FLOPs are its seconds, and a device does one a second: then no time is rounded to nanoseconds.
    unit = Device("one unit of work a second", {"float32": 1.0}, bandwidth=inf)
    machine = Hardware("simulated", unit, Link("hop", latency=hop, bandwidth=inf), per_node=1 << 30)
    replaying = Replay(schedule.ranks, machine, meta={"plan": plan.to_json(), "schedule": schedule.name})
    for rank, row in enumerate(lower(schedule).rows):
        script = _script(schedule, rank, row, seconds, plan.recompute == "full")
        replaying.feed(rank, script.ops, script.names, script.memory)
    replaying.finish()
    timeline = replaying.timeline()
    timeline.clock = "simulated"
    timeline.notes = []
    timeline.spans["flops"] = 0.0
    del timeline.meta["hardware"]  # there is none
    return timeline


def _script(
    schedule: Schedule, rank: int, row: Sequence[Action], seconds: dict[str, list[float]], recompute: bool
) -> RankTrace:
    """What a rank that does these actions would record. Op i lasts from 2i+1 to 2i+2 on its wall clock."""
    holders = schedule.stage_to_rank
    ops: list[Row] = []
    memory: list[tuple[int, int, int]] = []  # time, ops begun, delta
    names: dict[str, int] = {"": 0}
    received: dict[tuple[str, int, int], int] = {}

    def add(
        kind: Kind, stage: int, m: int, time: float = 0.0,
        group: str = "", number: int = -1, peer: int = -1, ref: int = -1,
    ) -> None:  # fmt: skip
        ops.append((kind, stage, m, time, names.setdefault(group, len(names)), number, peer, ref))

    add(Kind.STEP, -1, -1)
    for action in row:
        kind, stage, m = action.kind, action.stage, action.microbatch
        if kind.startswith("SEND"):
            to = holders[stage + 1] if kind == "SEND_F" else holders[stage - 1]
            add(Kind.SEND, stage, m, group=f"{rank}>{to}#{kind[-1]}{stage}", number=m, peer=to)
        elif kind.startswith("RECV"):
            sender = stage - 1 if kind == "RECV_F" else stage + 1
            received[kind[-1], stage, m] = len(ops)
            group = f"{holders[sender]}>{rank}#{kind[-1]}{sender}"
            add(Kind.RECV, stage, m, group=group, number=m, peer=holders[sender])
        else:
            message = received.pop(("F" if kind == "F" else "B", stage, m), None) if kind != "W" else None
            if kind in ("B", "I") and recompute:  # needs no gradient, and so does not wait for it
                add(Kind.RECOMPUTE, stage, m, seconds["R"][stage])
            if message is not None:
                add(Kind.WAIT, stage, m, ref=message)
            add(KIND[kind], stage, m, seconds[kind][stage])
            if kind == "F":
                memory.append((2 * len(ops) - 1, len(ops), 1))
            elif kind in ("B", "W"):
                memory.append((2 * len(ops), len(ops), -1))
    return _trace(ops, memory, list(names))


def _trace(ops: list[Row], memory: list[tuple[int, int, int]], names: list[str]) -> RankTrace:
    columns = list(zip(*ops, strict=True))
    records = np.zeros(len(ops), OP)
    names_of_columns = ("kind", "stage", "microbatch", "flops", "group", "number", "peer", "ref")
    for column, values in zip(names_of_columns, columns, strict=True):
        records[column] = values
    records["lane"] = [lane_of(kind) for kind in columns[0]]
    records["start"] = 2 * np.arange(len(ops)) + 1
    records["end"] = records["start"] + 1
    changes = np.zeros(len(memory), MEMORY)
    if memory:
        changes["time"], changes["op"], changes["delta"] = zip(*memory, strict=True)
    changes["category"] = CATEGORIES.index("activations")
    return RankTrace(records, changes, names)


def _by_stage(name: str, value: object, stages: int) -> list[float]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [_check(name, value)] * stages
    given = [_check(name, each) for each in value]
    if len(given) != stages:
        raise ValueError(
            f"simulate({name}={given}) names {len(given)} times for {stages} stages. Give one number for all stages, "
            f"{name}=1.0, or one a stage, {name}={[1.0] * stages}."
        )
    return given


def _check(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ValueError(f"simulate({name}={value!r}): a time is a number of seconds, such as {name}=1.0")
    if not isfinite(value) or value < 0:
        raise ValueError(f"simulate({name}={value!r}): a time is finite and not negative, such as {name}=1.0")
    return float(value)
