"""Simulation: a schedule on the clock, without processes.

    play          when each action begins and ends, what it needs being there (`mpkit.schedule.play`)
    spans, held   those times as a Timeline has them (`mpkit.simulated`)

It is the Timeline that a replay of what the ranks would record comes to, message for message, found without writing
that down first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np

from mpkit.plan import Plan
from mpkit.plan_checks import every, whole
from mpkit.schedule import Action, Schedule, build
from mpkit.schedule.play import timed
from mpkit.simulated import Done, held, spans
from mpkit.timeline import Timeline
from mpkit.tracebacks import public

__all__ = ["Times", "by_stage", "simulate", "time_of", "whole_backward"]

Times = float | Sequence[float]


@public
def simulate(
    plan: Plan | Schedule,
    forward: Times = 1.0,
    input_grad: Times = 1.0,
    weight_grad: Times = 1.0,
    hop: float = 0.0,
    *,
    backward: Times | None = None,
    steps: int = 1,
) -> Timeline:
    """When each action of a plan's schedule would happen.

    Args:
        plan: its schedule and its degrees; or a schedule.
        forward: seconds a forward takes, one number or one a stage.
        input_grad: seconds the gradients of the inputs take, likewise. A backward that is not split takes
            `input_grad + weight_grad`.
        weight_grad: seconds the gradients of the weights take, likewise.
        hop: seconds a message takes from stage to stage; nobody waits for it but its receiver.
        backward: seconds a backward takes that is not split, likewise, where that is not the sum of its halves.
        steps: how many, one after the other: a rank begins a step when it is done with its part of the one before.

    Returns:
        a Timeline on the clock "simulated". Its memory counts activations: 1 "byte" for each micro-batch of a stage,
        from the start of its forward to the end of its backward (of `W` where that is split).

    Raises:
        ValueError: times that are negative, infinite, or of another number than there are stages.

    >>> t = simulate(Plan.gpipe(4, 8))
    >>> t.makespan, t.idle, t.bubble
    (33.0, [9.0, 9.0, 9.0, 9.0], 0.2727272727272727)
    >>> t = simulate(Plan(pp=4, schedule="zbv", microbatches=8, virtual_stages=2))
    >>> t.makespan, [peak["activations"] for peak in t.peak_memory]
    (51.0, [8, 8, 8, 8])
    """
    if isinstance(plan, Schedule):
        plan = Plan.from_schedule(plan)
    if not isinstance(plan, Plan):
        raise ValueError(f"simulate({plan!r}): give a Plan, such as simulate(Plan.gpipe(4, 8))")
    if (whole(steps) or 0) < 1:
        raise ValueError(f"steps={steps!r}: a whole number, 1 or more, such as steps=3")
    schedule = _after_each_other(build(plan), steps)
    f, i, w = (
        by_stage(name, value, schedule.stages)
        for name, value in (("forward", forward), ("input_grad", input_grad), ("weight_grad", weight_grad))
    )
    k = every(plan.recompute)
    again = [time / k if k else 0.0 for time in f]
    slots = {"F": f, "I": i, "W": w, "B": whole_backward(backward, i, w)}
    rows, stuck = timed(schedule, slots, time_of("hop", hop), again)
    assert not stuck, "a plan's schedule is valid"
    done = Done.of(rows)
    found, names = spans(done, schedule, hop, np.array(again), steps)
    meta = {"plan": plan.to_json(), "schedule": schedule.name}
    return Timeline(found, names, held(done), schedule.ranks, "simulated", meta)


def _after_each_other(schedule: Schedule, steps: int) -> Schedule:
    """Several steps of a schedule as one, their micro-batches counted on."""
    if steps == 1:
        return schedule
    m = schedule.microbatches

    def of(step: int, actions: Iterable[Action]) -> list[Action]:
        return [Action(kind, stage, i + step * m) for kind, stage, i in actions]

    rows = [[action for step in range(steps) for action in of(step, row)] for row in schedule.rows]
    together = [action for step in range(steps) for action in of(step, schedule.together)]
    return Schedule(rows, schedule.name, schedule.stage_to_rank, together)


def whole_backward(backward: Times | None, i: Sequence[float], w: Sequence[float]) -> list[float]:
    """By stage, seconds of a backward that is not split: as given, or the sum of its halves.

    Raises:
        ValueError: as `by_stage`.
    """
    return (
        [a + b for a, b in zip(i, w, strict=True)]
        if backward is None
        else by_stage("backward", backward, len(i))
    )


def by_stage(name: str, value: object, stages: int) -> list[float]:
    """Seconds, one number or one a stage, as one a stage.

    Raises:
        ValueError: they are negative, infinite, or of another number than there are stages.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [time_of(name, value)] * stages
    given = [time_of(name, each) for each in value]
    if len(given) != stages:
        raise ValueError(
            f"{name}={given} names {len(given)} times for {stages} stages. Give one number for all stages, "
            f"{name}=1.0, or one a stage, {name}={[1.0] * stages}."
        )
    return given


def time_of(name: str, value: object) -> float:
    """Seconds as a float.

    Raises:
        ValueError: they are no number, negative or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ValueError(f"{name}={value!r}: a time is a number of seconds, such as {name}=1.0")
    if not isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r}: a time is finite and not negative, such as {name}=1.0")
    return float(value)
