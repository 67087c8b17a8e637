"""Simulation: a schedule played on a clock, without processes.

    play          when each action begins and ends, as soon as what it needs is there (`mpkit.plan.schedule.play`)
    spans, held   those times in the form of a Timeline (`mpkit.timeline.played_schedule`)

The result equals, message for message, the Timeline that a replay of the ranks' records would give, without making
those records first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np

from mpkit.common.tracebacks import public
from mpkit.plan.checks import every, whole
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Action, Schedule
from mpkit.plan.schedule.play import BESIDE, time_actions
from mpkit.timeline.played_schedule import PlayedActions, held_changes, spans
from mpkit.timeline.timeline import Timeline

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
    schedule = _after_each_other(plan.build(), steps)
    f, i, w = (
        by_stage(name, value, schedule.stages)
        for name, value in (("forward", forward), ("input_grad", input_grad), ("weight_grad", weight_grad))
    )
    k = every(plan.recompute)
    again = [time / k if k else 0.0 for time in f]
    slots = {"F": f, "I": i, "W": w, "B": whole_backward(backward, i, w)}
    if beside is not None:
        slots[BESIDE] = by_stage("beside", beside, schedule.stages)
    rows, stuck = time_actions(schedule, slots, time_of("hop", hop), again)
    assert not stuck, "a plan's schedule is valid"
    done = PlayedActions.from_rows(rows)
    table, names = spans(done, schedule, hop, np.array(again), steps)
    meta = {"plan": plan.to_json(), "schedule": schedule.name}
    return Timeline(table, names, held_changes(done), schedule.ranks, "simulated", meta)


def _after_each_other(schedule: Schedule, steps: int) -> Schedule:
    """Join several steps of a schedule into one schedule, with micro-batches numbered consecutively."""
    if steps == 1:
        return schedule
    m = schedule.microbatches

    def number_actions(step: int, actions: Iterable[Action]) -> list[Action]:
        return [Action(kind, stage, i + step * m) for kind, stage, i in actions]

    rows = [
        [action for step in range(steps) for action in number_actions(step, row)] for row in schedule.rows
    ]
    together = [action for step in range(steps) for action in number_actions(step, schedule.together)]
    return Schedule(rows, schedule.name, schedule.stage_to_rank, together)


def whole_backward(backward: Times | None, i: Sequence[float], w: Sequence[float]) -> list[float]:
    """Return the seconds per backward that is not split, by stage: as given, or the sum of its halves.

    Raises:
        ValueError: as for `by_stage`.
    """
    return (
        [a + b for a, b in zip(i, w, strict=True)]
        if backward is None
        else by_stage("backward", backward, len(i))
    )


def by_stage(name: str, value: object, stages: int) -> list[float]:
    """Return seconds per stage, from one number or one per stage.

    Raises:
        ValueError: one is negative or infinite, or their number differs from the number of stages.
    """
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
    """Return seconds as a float.

    Raises:
        ValueError: the value is not a number, or is negative or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ValueError(f"{name}={value!r}: a time is a number of seconds, such as {name}=1.0")
    if not isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r}: a time is finite and not negative, such as {name}=1.0")
    return float(value)
