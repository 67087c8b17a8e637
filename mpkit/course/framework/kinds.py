"""Kinds of exercises: `OnRanks`, whose answer runs on ranks, and `Questions`, whose answer is a dict of values.

`OnRanks` has a function, or a class, that `play` calls on the ranks of each case:

    play      run the answer on real ranks, under seeded delays
    result    compare the result of every rank with the expected one
    budgets   compare what the answer used with what a right answer may use
    frugal    in the last case, compare what each rank computes, holds and sends with what the solution's ranks do

`Questions` has a value for each question. A right value is shown, while a wrong one is only reported as wrong. A
mistake is recognized by a wrong value that is the same as the mistake's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mpkit.course.framework.equal import WHOLE, difference, spell
from mpkit.course.framework.exercise import UNFORESEEN, Answer, Budget, Case, CheckRow, Exercise, Seen
from mpkit.course.framework.measures import row_beside
from mpkit.course.framework.room import PackedAnswer, Room

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


LONGEST = 160
"""Expected results of so many characters are shown whole where an answer is wrong."""


def call_with(inputs: Callable[[Case, int], Sequence[Any]]) -> Callable[[Context, Answer, Case], Any]:
    """Return a `play` that calls the answer with the context and a rank's inputs, and returns its result.

    Args:
        inputs: inputs(case, rank) returns the answer's arguments after the context.
    """
    return lambda ctx, answer, case: answer(ctx, *inputs(case, ctx.rank))


def _is_the_modules(*_: Any) -> Any:
    """Stand for a function that the exercise's module defines (`Exercise.complete`)."""
    raise NotImplementedError


def _never(_: Seen) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class OnRanks(Exercise):
    """An exercise whose answer runs on ranks.

    Attributes:
        cases: the cases in the order in which they are tried, the simple ones first.
        play: play(ctx, answer, case) runs on every rank; what it returns is checked. `call_with` writes the simplest.
        expected: expected(case) returns what `play` should return, by rank.
        together: together(case, results) returns what is compared with `expected`, by rank, where that takes the
            results of all ranks: parts that the ranks choose, which have to make a whole.
        budgets: the budgets, checked once all results of a case are right.
        raced: whether something was read before it had arrived: such results differ from run to run.
    """

    cases: Sequence[Case]
    budgets: Sequence[Budget] = ()
    play: Callable[[Context, Answer, Case], Any] = _is_the_modules
    expected: Callable[[Case], Sequence[Any]] = _is_the_modules
    together: Callable[[Case, list[Any]], list[Any]] | None = None
    raced: Callable[[Seen], Any] = _never

    def examine(self, answer: PackedAnswer, room: Room) -> Iterator[CheckRow]:
        """Try the answer case by case."""
        for case in self.cases:
            seen = replace(self._play_case(answer, case, room), expected=self.expected(case))
            row = self._result(seen)
            if not row.ok and seen.is_finished and self.raced(seen):
                row = replace(row, seen=replace(seen, raced=True))
            yield row
            if not row.ok:
                return
            rows = [budget.row(seen) for budget in self.budgets]
            yield from rows
            if not all(row.ok for row in rows):
                return
            if case is self.cases[-1]:
                yield row_beside(seen, self.try_again(PackedAnswer.pack(self.solution), seen, room))

    def try_again(self, answer: PackedAnswer, seen: Seen, room: Room) -> Seen:
        """Try another answer on the same case."""
        return replace(self._play_case(answer, seen.case, room), expected=seen.expected, budget=seen.budget)

    def _play_case(self, answer: PackedAnswer, case: Case, room: Room) -> Seen:
        seen = room.play(self.play, answer, case)
        if self.together is None or seen.got is None:
            return seen
        try:
            return replace(seen, got=self.together(case, list(seen.got)))
        except UNFORESEEN:  # results of another form, which the comparison says
            return seen

    def _result(self, seen: Seen) -> CheckRow:
        what = f"{self.result}, on {seen.case}"
        first = spell(seen.expected[0])
        if seen.got is None:
            got = "the ranks hang" if seen.hang else seen.error.partition(". ")[0]
            return CheckRow(what, first, got, False, seen)
        for rank, (expected, got) in enumerate(zip(seen.expected, seen.got, strict=True)):
            wrong = difference(expected, got)
            if wrong is not None:
                whole = spell(expected, WHOLE)
                short = whole if len(whole) <= LONGEST else spell(expected)
                return CheckRow(what, short, f"rank {rank}: {wrong}", False, seen)
        return CheckRow(what, first, "equal on every rank", True, seen)


@dataclass(frozen=True, kw_only=True)
class Questions(Exercise):
    """An exercise whose answer is a dict.

    Attributes:
        truth: truth(room) returns the right values by question; it may run or replay something to find them.
        within: by question, how far a number may be off, as a share of the right one; 0.01 for all others.
    """

    truth: Callable[[Room], Mapping[str, Any]] = _is_the_modules
    within: Mapping[str, float] = field(default_factory=dict)

    def examine(self, answer: PackedAnswer, room: Room) -> Iterator[CheckRow]:
        """Check the values question by question, all of them."""
        # Before anything that it could look for is on this machine.
        given = room.play(_value, answer, Case(1))
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

    def is_untouched(self, seen: Seen) -> bool:
        """Return whether no question has an answer yet."""
        values = seen.got[0] if seen.got is not None else None
        return isinstance(values, dict) and all(value in (..., "...") for value in values.values())

    def shares_error(self, seen: Seen, wrong: Any) -> bool:
        """Return whether the answer has a value of a mistake's where that is wrong."""
        values = seen.got[0] if seen.got is not None else None
        if not isinstance(values, dict):
            return False
        return any(
            not self._right(name, right, theirs := wrong[name])
            and not self._right(name, right, values.get(name, ...))
            and self._right(name, theirs, values[name])
            for name, right in seen.expected[0].items()
        )

    def _right(self, name: str, right: Any, value: Any) -> bool:
        if isinstance(right, float) and isinstance(value, int | float) and not isinstance(value, bool):
            return abs(value - right) <= self.within.get(name, 0.01) * abs(right)
        return difference(right, value) is None


def _value(ctx: Context, answer: Any, case: Case) -> Any:
    return answer() if callable(answer) else answer
