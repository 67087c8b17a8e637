"""What a student reads about a wrong answer: a failure on ranks as a lesson, and then the mistake and its hints.

The lesson comes before any hint of the exercise's own:

hang       the launcher's report, and the rule of communication that was broken
error      the error and the student's own line, without the lines inside torch and the kit

The mistake shows in what the answer did:

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

__all__ = ["SLIP", "STUB", "lesson", "tell"]


RULES = (
    (
        r"never came to (\w+)",
        "A collective is complete only when every rank of its group has called it, as often as the others. Look for "
        "the branch, or the loop, that keeps a rank from calling it.",
    ),
    (
        r"never sent it",
        "A receive waits until the other rank sends, with the same tag, and as often. Either that send is missing, or "
        "the sender waits for something itself, before it comes to it.",
    ),
    (
        r"never received it",
        "A send is complete only when the other rank receives (no buffer in between is promised). If two ranks first "
        "send to each other and then receive, both wait for ever: let one receive first, or start the sends with "
        "isend and wait for them after the receives.",
    ),
    (
        r"is not waiting",
        "A rank was still busy when the time was up: an endless loop, most likely. The report shows the line.",
    ),
)


def lesson(seen: Seen) -> list[str]:
    """Return paragraphs on what happened, and on the rule behind it; none if the ranks finished without an error.

    >>> from mpkit.course.framework.exercise import Case
    >>> lesson(Seen(Case(2), error="rank 1: ValueError: too many", where="line 3 of the cell, in f: g()"))
    ['rank 1: ValueError: too many', 'It comes from line 3 of the cell, in f: g()']
    """
    if seen.hang:
        rule = next((words for pattern, words in RULES if re.search(pattern, seen.hang)), "")
        return [seen.hang, *([rule] if rule else [])]
    if seen.error:
        where = [f"It comes from {seen.where}"] if seen.where else []
        return [seen.error, *where]
    return []


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
