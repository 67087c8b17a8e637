"""Changes of a run: what `Run.what_if` is asked, as one setting after the other.

    link, overlap           the machine: the plan and its compute stay as they are
    ranks                   the plan's axis that has several ranks
    any other field         the plan

Each change applies on top of those before it, so that its effect is known. Changes that only work together, such as a
schedule and its virtual_stages, count as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import isfinite, prod
from typing import Any

from mpkit.plan.hybrid import change_plan
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import ANY, SCHEDULES
from mpkit.plan.synonyms import MEANT

__all__ = ["ChangedPlan", "settings"]

OF_MACHINE = "link", "overlap"
EXAMPLE = 'run.what_if(link=2, microbatches=16, schedule="zb_h1")'


@dataclass(frozen=True)
class ChangedPlan:
    """What a step is predicted for.

    Attributes:
        change: the last change that led to it, in words; "" for the run as it was.
        plan: the plan.
        link: how many times as fast messages and collectives are.
        overlap: whether communication goes on while its rank computes.
    """

    change: str
    plan: Plan
    link: float = 1.0
    overlap: bool = True


def settings(plan: Plan, changes: Mapping[str, Any]) -> list[ChangedPlan]:
    """Return the setting of the run, and one after each change.

    >>> [each.change for each in settings(Plan.gpipe(2, 4), {"link": 2, "schedule": "zb_h1", "cut": "balanced"})]
    ['', 'link x2', 'schedule zb_h1', 'cut balanced']
    >>> settings(Plan.gpipe(2, 4), {"ranks": 4})[-1].plan
    Plan(pp=4, schedule='gpipe', microbatches=4)

    Raises:
        ValueError: there are no changes, no such one, or the plan would not work.
    """
    _check_names(changes)
    found, waiting, failed = [ChangedPlan("", plan)], {}, None
    for name, value in changes.items():
        waiting[name] = value
        try:
            found.append(_apply_changes(found[-1], waiting))
        except ValueError as error:  # it may need the change after it
            failed = error
        else:
            waiting, failed = {}, None
    if failed is not None:
        raise ValueError(f"run.what_if({_call(waiting)}) of {plan}: {failed}") from None
    return found


def _apply_changes(before: ChangedPlan, changes: Mapping[str, Any]) -> ChangedPlan:
    """Return the setting after some changes at once."""
    link, overlap = before.link, before.overlap
    if "link" in changes:
        link *= _factor(changes["link"])
    if "overlap" in changes:
        overlap = _flag(changes["overlap"])
    fields_changed = {name: value for name, value in changes.items() if name not in (*OF_MACHINE, "ranks")}
    if fields_changed.get("cut") == "balanced":
        fields_changed["cut"] = None
    if "ranks" in changes:
        fields_changed |= _ranks(before.plan, changes["ranks"])
    words = ", ".join(_words(name, value) for name, value in changes.items())
    plan = change_plan(before.plan, **_without_old_stages(before.plan, fields_changed))
    return ChangedPlan(words, plan, link, overlap)


def _without_old_stages(plan: Plan, changed: dict[str, Any]) -> dict[str, Any]:
    """Give a schedule the stages per rank that it can have, where the change says nothing about them."""
    if "schedule" not in changed or "virtual_stages" in changed:
        return changed
    known = SCHEDULES.get(changed["schedule"]) if isinstance(changed["schedule"], str) else None
    if known is not None and known.per_rank == ANY:
        return {"virtual_stages": max(2, plan.virtual_stages)} | changed
    return {"virtual_stages": 1} | changed


def _ranks(plan: Plan, ranks: Any) -> dict[str, int]:
    """Return the degree that makes the plan take so many ranks: of the axis that has several, dp if more have."""
    degrees = {axis: getattr(plan, axis) for axis in ("pp", "dp", "tp", "cp")}
    several = [axis for axis, degree in degrees.items() if degree > 1]
    axis = several[0] if len(several) == 1 else "dp"
    own = [degree for _, degree in plan.mesh.own]
    others = prod([*own, *(degree for name, degree in degrees.items() if name != axis)])
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1 or ranks % others:
        raise ValueError(
            f"ranks={ranks!r}: {axis} is what changes, and the other axes take {others} rank{'s' * (others > 1)}: "
            f"ranks={2 * plan.ranks}, or name the axes: {', '.join(f'{name}={degrees[name]}' for name in degrees)}"
        )
    return {axis: ranks // others}


def _check_names(changes: Mapping[str, Any]) -> None:
    known = [*OF_MACHINE, "ranks", *(field.name for field in fields(Plan))]
    if not changes:
        raise ValueError(f"run.what_if() changes nothing; give what is to be different, as in {EXAMPLE}")
    for name in changes:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}={changes[name]!r}?" if near else MEANT.get(name, "")
            raise ValueError(
                f"run.what_if({name}=...): there is no such change{'; ' + hint if hint else '.'} There are "
                f"{', '.join(known)}, as in {EXAMPLE}"
            )


def _factor(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not isfinite(value) or value <= 0:
        raise ValueError(
            f"link={value!r}: give how many times as fast messages are: link=2, or link=0.5 for half the speed"
        )
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(
            f"overlap={value!r}: overlap=False lets each rank wait for every communication at once"
        )
    return value


def _words(name: str, value: Any) -> str:
    if name == "link":
        return f"link x{value:g}"
    if name == "overlap":
        return "overlap" if value else "no overlap"
    return f"{name} {getattr(value, 'name', value)}"


def _call(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())
