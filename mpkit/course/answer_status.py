"""Whether there is an answer at all: what a check says in an exam, where nothing says whether it is right.

stub     it is what was handed out: not answered
missing  a question has no value: not answered
error    the student's own line raises an error, or the ranks hang: said, with the line
"""

from __future__ import annotations

from mpkit.course.framework.exercise import CheckRow
from mpkit.course.framework.observation import Seen

__all__ = ["ANSWERED", "NOT_ANSWERED", "answered_row", "questions_left"]

ANSWERED, NOT_ANSWERED = "answered", "not answered"


def answered_row(seen: Seen, untouched: bool, asked: tuple[str, ...] = ()) -> CheckRow:
    """Return the row that says whether there is an answer.

    >>> from mpkit.course.framework.exercise import Case
    >>> answered_row(Seen(Case(1), got=[{"a": 1, "b": "..."}]), False, ("a", "b")).got
    'no answer yet to b'

    Args:
        seen: what the answer did in the first case.
        untouched: whether it is what was handed out.
        asked: the questions that it should answer, if it is a dict.
    """
    left = questions_left(seen, asked)
    if untouched:
        got = "nothing is written yet"
    elif seen.hang:
        got = "the ranks hang"
    elif seen.error:
        got = f"{seen.error.partition('. ')[0]}{f', in {seen.where}' if seen.where else ''}"
    elif left:
        got = f"no answer yet to {', '.join(left)}"
    else:
        return CheckRow("your answer", "an answer that runs", ANSWERED, True, seen)
    return CheckRow("your answer", "an answer that runs", got, False, seen)


def questions_left(seen: Seen, asked: tuple[str, ...]) -> list[str]:
    """Return the questions that have no value."""
    values = seen.got[0] if seen.got is not None else None
    given = values if isinstance(values, dict) else {}
    return [name for name in asked if given.get(name, ...) in (..., "...")] if seen.is_finished else []
