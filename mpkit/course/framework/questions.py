"""Exercises whose answer is a dict: a value for each question.

A right value is shown, while a wrong one is only reported as wrong. A mistake is recognized by a wrong value that is
the same as the mistake's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mpkit.course.framework.equal import difference, spell
from mpkit.course.framework.exercise import Case, CheckRow, Exercise
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.room import PackedAnswer, Room

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["Questions"]


@dataclass(frozen=True, kw_only=True)
class Questions(Exercise):
    """An exercise whose answer is a dict.

    Attributes:
        truth: truth(room) returns the right values by question; it may run or replay something to find them.
        within: by question, how far a number may be off, as a share of the right one; 0.01 for all others.
    """

    truth: Callable[[Room], Mapping[str, Any]]
    within: Mapping[str, float] = field(default_factory=dict)

    def examine(self, answer: PackedAnswer, room: Room) -> Iterator[CheckRow]:
        """Check the values question by question, all of them."""
        given = self._read_values(answer, room)  # before anything that it could look for is on this machine
        truth = self.truth(room)
        seen = replace(given, expected=[dict(truth)])
        values = seen.got[0] if seen.got is not None else None
        if not isinstance(values, dict):
            got = seen.error or seen.hang or spell(values)
            asked = f"a dict: a value for each of {len(truth)} questions"
            yield CheckRow("your answers", asked, got, False, replace(seen, got=None))
            return
        for name, right in truth.items():
            value = values.get(name, ...)
            ok = self._right(name, right, value)
            got = "no answer yet" if value in (..., "...") else spell(value)
            yield CheckRow(name, spell(right) if ok else "?", got, ok, seen)

    def try_answer(self, answer: PackedAnswer, room: Room) -> Seen:
        """Read the values."""
        return self._read_values(answer, room)

    def questions_of(self, stub: Any) -> tuple[str, ...]:
        """Return the questions of the dict that is handed out."""
        return tuple(stub)

    def try_again(self, answer: PackedAnswer, seen: Seen, room: Room) -> Seen:
        """Read the values of another answer."""
        return replace(self._read_values(answer, room), expected=seen.expected)

    def is_untouched(self, seen: Seen) -> bool:
        """Return whether no question has an answer yet."""
        values = seen.got[0] if seen.got is not None else None
        return isinstance(values, dict) and all(value in (..., "...") for value in values.values())

    def same_result(self, seen: Seen, other: Seen) -> bool:
        """Return whether some value is wrong and equal to the other answer's."""
        if seen.got is None or other.got is None:
            return False
        truth, given, theirs = seen.expected[0], seen.got[0], other.got[0]
        return any(
            name in given
            and not self._right(name, right, theirs[name])
            and difference(theirs[name], given[name]) is None
            for name, right in truth.items()
        )

    def _right(self, name: str, right: Any, value: Any) -> bool:
        if isinstance(right, float) and isinstance(value, int | float) and not isinstance(value, bool):
            return abs(value - right) <= self.within.get(name, 0.01) * abs(right)
        return difference(right, value) is None

    def _read_values(self, answer: PackedAnswer, room: Room) -> Seen:
        return room.play(_value, answer, Case(1))


def _value(ctx: Context, answer: Any, case: Case) -> Any:
    return answer() if callable(answer) else answer
