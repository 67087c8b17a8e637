"""Exercises whose answer runs on ranks: a function, or a class, that `play` calls there.

For each case:

    play      on real ranks, under seeded delays
    result    equal to what is expected, on every rank
    budgets   of what a right answer may use
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpkit.classroom.equal import difference, spell
from mpkit.classroom.exercise import Budget, Case, Exercise, Row
from mpkit.classroom.room import Answer, Room
from mpkit.classroom.seen import Seen

if TYPE_CHECKING:
    from mpkit.launch.context import Context

__all__ = ["OnRanks"]


@dataclass(frozen=True, kw_only=True)
class OnRanks(Exercise):
    """An exercise whose answer runs on ranks.

    Attributes:
        cases: in this order, so the simple come first.
        play: play(ctx, answer, case) on every rank; what it returns is checked.
        expected: expected(case): what that is, by rank.
        result: what that is, in words, such as "the sum".
        budgets: checked once all results of a case are right.
    """

    cases: Sequence[Case]
    play: Callable[[Context, Any, Case], Any]
    expected: Callable[[Case], Sequence[Any]]
    result: str
    budgets: Sequence[Budget] = ()

    def examine(self, answer: Answer, room: Room) -> Iterator[Row]:
        """Case by case."""
        for case in self.cases:
            seen = replace(room.play(self.play, answer, case), expected=self.expected(case))
            row = self._result(seen)
            yield row
            if not row.ok:
                return
            rows = [budget.row(seen) for budget in self.budgets]
            yield from rows
            if not all(row.ok for row in rows):
                return

    def again(self, answer: Answer, seen: Seen, room: Room) -> Seen:
        """The same case once more."""
        return replace(room.play(self.play, answer, seen.case), expected=seen.expected, budget=seen.budget)

    def _result(self, seen: Seen) -> Row:
        what = f"{self.result}, on {seen.case}"
        first = spell(seen.expected[0])
        if seen.got is None:
            got = "the ranks hang" if seen.hang else seen.error.partition(". ")[0]
            return Row(what, first, got, False, seen)
        for rank, (expected, got) in enumerate(zip(seen.expected, seen.got, strict=True)):
            wrong = difference(expected, got)
            if wrong is not None:
                return Row(what, spell(expected), f"rank {rank}: {wrong}", False, seen)
        return Row(what, first, "equal on every rank", True, seen)
