"""Checks of a Plan's schedule. Every message ends with a plan that works, to paste."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from mpkit.plan.checks import call_of
from mpkit.plan.schedule import Schedule, validate
from mpkit.plan.schedule.catalogue import ANY, GPIPE, INTERLEAVED_1F1B, OTHER_NAMES, SCHEDULES

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan
    from mpkit.plan.schedule.read import Source

__all__ = ["checked_schedule", "checked_virtual_stages", "own_schedule"]


def checked_schedule(plan: Plan) -> str | Schedule:
    """Return the name of an existing schedule, or a Schedule that can run and has the plan's degrees.

    Raises:
        ValueError: the plan's schedule is neither.
    """
    given: Any = plan.schedule
    if isinstance(given, str) and given in SCHEDULES:
        return given
    spelled = isinstance(given, str) and len(given.split()) > 1
    if not (
        spelled
        or callable(given)
        or isinstance(given, Schedule)
        or (_iterates(given) and not isinstance(given, str))
    ):
        names = list(SCHEDULES)
        word = str(given).lower().replace("-", "_").replace(" ", "_")
        near = OTHER_NAMES.get(word) or (get_close_matches(word, names, 1, 0.4) or [GPIPE])[0]
        several = {} if SCHEDULES[near].can_have(1) else {"virtual_stages": max(plan.virtual_stages, 2)}
        raise ValueError(
            f"Plan(schedule={given!r}): there is no such schedule. There are {', '.join(map(repr, names[:-1]))} and "
            f"{names[-1]!r}, and one of your own works too: its rows, or a function of (p, m). "
            f"The nearest is {call_of(plan, {'schedule': near, 'virtual_stages': 1, **several})}"
        )
    own = own_schedule(given, plan.pp, plan.microbatches)
    if (plan.pp, plan.microbatches) != (own.ranks, own.microbatches):
        raise ValueError(
            f"Plan(pp={plan.pp}, microbatches={plan.microbatches}, schedule={own.name!r}): the schedule has "
            f"{own.ranks} rows and {own.microbatches} micro-batches. Write Plan.from_schedule(schedule), or "
            f"Plan(pp={own.ranks}, microbatches={own.microbatches}, schedule=schedule)"
        )
    validate(own, own.stages, own.microbatches)
    return own


def _iterates(given: Any) -> bool:
    """Return whether it can really be iterated over: a tensor without dimensions has `__iter__` too."""
    try:
        iter(given)
    except TypeError:
        return False
    return True


def own_schedule(given: Source, p: int | None, m: int | None) -> Schedule:
    """Make a Schedule from a learner's own, in whatever form it is given.

    Raises:
        ValueError: it is not a schedule, or has no actions.
    """
    own = given if isinstance(given, Schedule) else Schedule(given, p=p, m=m)
    if not any(own.rows):
        raise ValueError(
            "Plan(schedule=[]): the schedule is empty. It has a row for each rank, such as "
            "Plan(pp=2, schedule=['0F0 0B0', '1F0 1B0'])"
        )
    return own


def checked_virtual_stages(plan: Plan) -> int:
    """Return the number of stages per rank, if the schedule can have that many.

    Raises:
        ValueError: the schedule cannot have that many.
    """
    name, v = plan.schedule, plan.virtual_stages
    if isinstance(name, Schedule):
        if v > 1 and name.stages != plan.pp * v:
            raise ValueError(
                f"Plan(pp={plan.pp}, virtual_stages={v}, schedule={name.name!r}): that would be {plan.pp * v} stages, "
                f"and the schedule has {name.stages}, whose ranks it names itself. Write Plan.from_schedule(schedule), "
                f"or Plan(pp={plan.pp}, microbatches={plan.microbatches}, schedule=schedule)"
            )
        return v
    per_rank = SCHEDULES[name].per_rank
    if per_rank == 2:
        if v not in (1, 2):  # 1 is the field's default
            raise ValueError(
                f"Plan(schedule={name!r}, virtual_stages={v}): {name} has 2 stages per rank, one on the way down and "
                f"one on the way up: {call_of(plan, {'virtual_stages': 2})}"
            )
        return 2
    if v > 1 and per_rank != ANY:
        several, two = (
            ", ".join(repr(each) for each, entry in SCHEDULES.items() if entry.per_rank == n)
            for n in (ANY, 2)
        )
        raise ValueError(
            f"Plan(schedule={name!r}, virtual_stages={v}): {name} has one stage per rank. Those with several are "
            f"{several} (any number) and {two} (2). Either {call_of(plan, {'virtual_stages': 1})} or "
            f"{call_of(plan, {'schedule': INTERLEAVED_1F1B})}"
        )
    return v
