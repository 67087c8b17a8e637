"""Exercises whose answer is a dict: a value for each question.

A right value is shown; of a wrong one only that it is wrong. A mistake shows where a value is the mistake's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mpkit.classroom.equal import difference, spell
from mpkit.classroom.exercise import Case, Exercise, Row
from mpkit.classroom.room import Answer, Room
from mpkit.classroom.seen import Seen

if TYPE_CHECKING:
    from mpkit.launch.context import Context

__all__ = ["Questions"]


@dataclass(frozen=True, kw_only=True)
class Questions(Exercise):
    """An exercise whose answer is a dict.

    Attributes:
        truth: truth(room): the right values by question; it may run or replay something to know them.
        within: by question, how far a number may be off, as a share of the truth; 0.01 where nothing is said.
    """

    truth: Callable[[Room], Mapping[str, Any]]
    within: Mapping[str, float] = field(default_factory=dict)

    def examine(self, answer: Answer, room: Room) -> Iterator[Row]:
        """Question by question, all of them."""
        truth = self.truth(room)
        seen = replace(self._given(answer, room), expected=[dict(truth)])
        values = seen.got[0] if seen.got is not None else None
        if not isinstance(values, dict):
            got = seen.error or seen.hang or spell(values)
            asked = f"a dict: a value for each of {len(truth)} questions"
            yield Row("your answers", asked, got, False, replace(seen, got=None))
            return
        for name, right in truth.items():
            value = values.get(name, ...)
            ok = self._right(name, right, value)
            got = "no answer yet" if value in (..., "...") else spell(value)
            yield Row(name, spell(right) if ok else "?", got, ok, seen)

    def again(self, answer: Answer, seen: Seen, room: Room) -> Seen:
        """Another dict."""
        return replace(self._given(answer, room), expected=seen.expected)

    def untouched(self, seen: Seen) -> bool:
        """Whether no question has an answer."""
        values = seen.got[0] if seen.got is not None else None
        return isinstance(values, dict) and all(value in (..., "...") for value in values.values())

    def alike(self, seen: Seen, other: Seen) -> bool:
        """Whether some value is wrong, and the other's."""
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

    def _given(self, answer: Answer, room: Room) -> Seen:
        return room.play(_value, answer, Case(1))


def _value(ctx: Context, answer: Any, case: Case) -> Any:
    return answer() if callable(answer) else answer
