"""The leaderboard of a class: right answers to exercises that are ranked, by their score on the exact clock.

The scores are those of the verdicts: whatever a notebook or a student's file of progress says of them changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.grading.grade_file import Grade

__all__ = ["HEAD", "leaderboard"]

HEAD = ("exercise", "place", "student", "score")


def leaderboard(
    entries: Iterable[ExerciseEntry], theirs: Mapping[str, Sequence[Grade]]
) -> Iterator[tuple[str, int, str, float]]:
    """Yield exercise, place, student and score, the best first; equal scores share a place.

    Args:
        entries: the exercises in their order.
        theirs: the grades of each student's notebooks, of which the best counts.
    """
    for entry in entries:
        scores = {student: _scores(grades, entry.name) for student, grades in theirs.items()}
        best = {student: min(each) for student, each in scores.items() if each}
        for student, score in sorted(best.items(), key=lambda each: (each[1], each[0])):
            place = 1 + sum(other < score * (1 - 1e-9) for other in best.values())
            yield entry.name, place, student, score


def _scores(grades: Sequence[Grade], name: str) -> list[float]:
    checked = [grade.checked.get(name) for grade in grades]
    return [each.score for each in checked if each is not None and each.score is not None]
