"""Suggestions: the plans that a rejection shows work, also if more than one thing is wrong with what was asked.

A check that rejects a plan suggests the same plan with one field changed. If the plan has two mistakes, the suggestion
still has the other, or the changed field clashes with a third. Its own rejection says what to change then, and so on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["with_working_plans"]

STEPS = 16
"""How many changes after each other are tried."""


def with_working_plans(message: str, make: Callable[..., object]) -> str:
    """Return a rejection in which each plan that it suggests is one that works.

    What a message begins with is what was asked for; it stays.

    Args:
        message: of the rejection.
        make: raises a ValueError, with a message of this kind, if a plan of these fields does not work.
    """
    parts, end = [], 0
    for start, stop in _calls(message):
        if start:
            parts += [message[end:start], _working_plan(message[start:stop], make)]
            end = stop
    return "".join([*parts, message[end:]])


def _working_plan(call: str, make: Callable[..., object]) -> str:
    """Return the first plan that works, from one suggestion to the next; the one given if there is none."""
    tried = call
    for _ in range(STEPS):
        values = _values(tried)
        if values is None:
            return call
        try:
            make(**values)
        except ValueError as rejected:
            message = str(rejected)
            following = [message[start:stop] for start, stop in _calls(message) if start]
            if not following:
                return call
            tried = following[0]
        else:
            return tried
    return call


def _calls(message: str) -> Iterator[tuple[int, int]]:
    """Yield where each `Plan(...)` of a message begins and ends.

    >>> [text[start:stop] for text in ["Plan(x=1): TensorPlan(()) mk.Plan(cut=(2, 4))"] for start, stop in _calls(text)]
    ['Plan(x=1)', 'Plan(cut=(2, 4))']
    """
    stop = 0
    for found in re.finditer(r"\bPlan\(", message):
        if found.start() < stop:
            continue
        depth, stop = 1, found.end()
        while depth and stop < len(message):
            depth += {"(": 1, ")": -1}.get(message[stop], 0)
            stop += 1
        yield found.start(), stop


def _values(call: str) -> dict[str, Any] | None:
    """Return the fields that a call names; None if one of them is not a number, a text or a sequence of them.

    >>> _values("Plan(dp=2, cut=[1, 3])"), _values("Plan(tensor=plan)")
    ({'dp': 2, 'cut': [1, 3]}, None)
    """
    try:
        parsed = ast.parse(call, mode="eval").body
        assert isinstance(parsed, ast.Call)
        return {str(each.arg): ast.literal_eval(each.value) for each in parsed.keywords}
    except (SyntaxError, ValueError):
        return None
