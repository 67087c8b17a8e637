"""Checks for what makes a Plan impossible. Every message ends with a plan that works, to paste."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan

__all__ = [
    "call_of",
    "check_ranks",
    "checked_cut",
    "checked_degree",
    "checked_recompute",
    "every",
    "real",
    "whole",
]

MOST = 1_000_000
"""Ranks, and also stages per rank and micro-batches."""

RECOMPUTE = ("none", "selective", "full")


def checked_degree(plan: Plan, name: str) -> int:
    """Return a degree as an int, 1 or more.

    Raises:
        ValueError: it is not a whole number of 1 or more.
    """
    value = getattr(plan, name)
    number = whole(value)
    if number is None or number < 1:
        good = {name: 4} if name in ("dp", "tp", "cp") else {"pp": 4, "microbatches": 8}
        good = {"dp": 8, "zero": 3, name: 4} if name.startswith("dp_") else good
        good = {"dp": 4, "ep": 4} if name == "ep" else good
        raise ValueError(
            f"Plan({name}={value!r}): {name} is a whole number, 1 or more, such as in {call_of(plan, good, bare=True)}"
        )
    if number > MOST:
        raise ValueError(
            f"Plan({name}={value!r}): that is more than any machine has. {name} is at most {MOST:,}, such as in "
            f"{call_of(plan, {name: 4}, bare=True)}"
        )
    return number


def check_ranks(plan: Plan) -> None:
    """Check that the degrees make no more ranks than can be.

    Raises:
        ValueError: they make more than `MOST`.
    """
    if plan.ranks > MOST:
        raise ValueError(
            f"Plan(pp={plan.pp}, dp={plan.dp}, tp={plan.tp}, cp={plan.cp}) has {plan.ranks:,} ranks, more than any "
            f"machine: at most {MOST:,}. Such as Plan(dp={min(plan.dp, 8)}, tp={min(plan.tp, 8)})"
        )


def checked_recompute(plan: Plan) -> str:
    """Return what is recomputed, after checking it.

    Raises:
        ValueError: there is no such choice.
    """
    given: Any = plan.recompute
    if isinstance(given, str) and given.startswith("every=") and every(given):
        return f"every={every(given)}"
    if not isinstance(given, str) or given not in RECOMPUTE:
        near = (get_close_matches(str(plan.recompute), RECOMPUTE, 1, 0.3) or ["full"])[0]
        if whole(given) or str(given).lower().startswith("every"):
            near = f"every={max(whole(given) or 2, 1)}"
        raise ValueError(
            f"Plan(recompute={plan.recompute!r}): recompute is one of {', '.join(map(repr, RECOMPUTE))}, or 'every=k': "
            f"every k-th block, such as 'every=2'. Did you mean {call_of(plan, {'recompute': near})}"
        )
    return plan.recompute


def every(recompute: str) -> int:
    """Return how many blocks there are for each recomputed one: 1 for "full", k for "every=k", else 0.

    >>> every("full"), every("every=2"), every("selective"), every("every=0"), every("every=two")
    (1, 2, 0, 0, 0)
    """
    if recompute == "full":
        return 1
    number = recompute.removeprefix("every=")
    return int(number) if recompute.startswith("every=") and number.isdecimal() else 0


def checked_cut(plan: Plan) -> tuple[int | str, ...] | None:
    """Return the first layer of each stage but stage 0; those given by number must increase.

    Raises:
        ValueError: their type, number or order is wrong. (`prepare` checks whether the model has them.)
    """
    cut: Any = plan.cut
    if cut is None:
        return None
    balanced = f"left out, the stages are balanced by FLOPs: {call_of(plan, {'cut': None})}"
    if isinstance(cut, str | int):
        cut = (cut,)
    if not isinstance(cut, Sequence):
        raise ValueError(
            f"Plan(cut={cut!r}): cut is a list of the layers, by number or name, with which the stages after "
            f"stage 0 begin; {balanced}"
        )
    if len(cut) != plan.stages - 1:
        raise ValueError(
            f"Plan(cut={list(cut)}) cuts the model into {len(cut) + 1} stages, but {_stages_of(plan)} asks for "
            f"{plan.stages}. Give the first layer of each stage but stage 0, {plan.stages - 1} in all; {balanced}"
        )
    points = [point if isinstance(point, str) else whole(point) for point in cut]
    numbers = [point for point in points if isinstance(point, int)]
    if None in points or any(a >= b for a, b in pairwise([0, *numbers])):
        good = {"cut": tuple(range(1, plan.stages))}
        raise ValueError(
            f"Plan(cut={list(cut)}): the points are layers, by number from 1 or by name, in rising order, such as "
            f"{call_of(plan, good)}"
        )
    return tuple(point for point in points if point is not None)


def _stages_of(plan: Plan) -> str:
    several = plan.virtual_stages > 1
    return f"pp={plan.pp}" + (f", virtual_stages={plan.virtual_stages}" if several else "")


def whole(value: object) -> int | None:
    """Return a whole number of any type (numpy's too) as an int, else None. True and False do not count as numbers."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def real(value: object) -> float | None:
    """Return a real number of any type (numpy's too) as a float, else None."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def call_of(plan: Plan, changes: dict[str, Any] | None = None, *, bare: bool = False) -> str:
    """Return the call that makes a plan with some changes or, if `bare`, one with the changes alone.

    Fields with their default value are left out, except for the schedule of a pipeline.
    """
    defaults = {field.name: field.default for field in fields(plan)}
    values = dict(defaults) if bare else {name: getattr(plan, name) for name in defaults}
    values |= changes or {}
    pipeline = values["pp"] != 1
    shown = [
        f"{name}={list(value) if name == 'cut' and isinstance(value, tuple) else value!r}"
        for name, value in values.items()
        if value != defaults[name] or (name == "schedule" and pipeline)
    ]
    return f"Plan({', '.join(shown)})"
