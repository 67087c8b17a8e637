"""A failure on ranks, as a lesson: what a student reads before any hint of the exercise's own.

hang     the launcher's report, and the rule of communication that was broken
error    the error and the student's own line, without the lines inside torch and the kit
"""

from __future__ import annotations

import re

from mpkit.course.framework.observation import Seen

__all__ = ["lesson"]

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
