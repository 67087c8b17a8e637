"""The mistake that shows in what a wrong answer did, and its hints.

stub       nothing is written yet
slip       an error of typing, in the student's own line
mistake    one that the exercise lists, or one of those that use too much
relation   how the results are related to the right ones, whatever led to them
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.detectors.relations import Relation, find_relation
from mpkit.course.framework.exercise import UNFORESEEN, Case, CheckRow, Mistake
from mpkit.course.framework.frugal import LOOP, WASTEFUL
from mpkit.course.framework.observation import Seen
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.source import run_cell

__all__ = ["SLIP", "STUB", "tell"]

STUB, SLIP = "not-written", "an-error"
"""What is told of programs that are no answers yet."""

SLIPS = (
    "NameError", "UnboundLocalError", "SyntaxError", "ImportError", "ModuleNotFoundError", "AttributeError",
)  # fmt: skip
"""Errors of typing, which say nothing of what the student has understood."""


def tell(
    entry: ExerciseEntry, row: CheckRow, room: Room, right: Sequence[Case] = ()
) -> tuple[str, Sequence[str]]:
    """Return the name of the mistake that shows, and its hints; else of a relation to the right results.

    Args:
        entry: the exercise.
        row: the check that failed.
        room: the ranks to run wrong answers on.
        right: the cases of the checks that passed.
    """
    exercise, seen = entry.exercise, row.seen
    if seen is not None:
        if exercise.is_untouched(seen):
            return STUB, (exercise.start,)
        if _is_typing_error(seen):
            return SLIP, ()
        for mistake in (LOOP, *exercise.mistakes, *WASTEFUL):
            if _shows(entry, mistake, seen, room):
                return mistake.name, mistake.hints
        if seen.error and seen.where and not seen.mismatch:
            return SLIP, ()
        if isinstance(exercise, OnRanks):
            cases = [case for case in right if case != seen.case]
            relation = _over_budget(row, seen) or find_relation(seen, cases)
            if relation is not None:
                return relation.name, [f"{relation.words} {hint}" for hint in exercise.otherwise]
    return "", exercise.otherwise


def _over_budget(row: CheckRow, seen: Seen) -> Relation | None:
    """Return by how much the answer exceeds a budget, if it does: its results are right then."""
    if not seen.budget:
        return None
    said = f"The results are right on {seen.case}. Counted: {seen.budget}: {row.got}, and {row.expected} is allowed."
    return Relation("over-budget", said)


def _is_typing_error(seen: Seen) -> bool:
    """Return whether the student's own line ended in an error of typing."""
    kind = re.search(r"(?:rank \d+: )?(\w+): ", seen.error)
    return bool(seen.where) and kind is not None and kind[1] in SLIPS and "NoneType" not in seen.error


def _shows(entry: ExerciseEntry, mistake: Mistake, seen: Seen, room: Room) -> bool:
    if mistake.when is None:
        wrong = run_cell(mistake.wrong, entry.exercise.name_of_answer, mistake.name, entry.given_code)
        other = entry.exercise.try_again(PackedAnswer.pack(wrong), seen, room) if seen.is_finished else None
        return other is not None and entry.exercise.same_result(seen, other)
    try:
        return bool(mistake.when(seen))
    except (*UNFORESEEN, AssertionError):  # there is nothing to look at: no results, no trace
        return False
