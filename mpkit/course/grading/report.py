"""Reports for instructors: a table of the class (CSV), a page per student (HTML) with hints, and a page on the class.
All grow notebook by notebook.

The table is replaced as a whole by a longer one, so that it is complete whenever somebody opens it. No two students
share a row or a page: if two names would give the same file name, each file name also has a part of its name's digest.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from mpkit.common.safe_text import visible
from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.framework.variants import plainly
from mpkit.course.grading.class_report import ClassReport, class_report
from mpkit.course.grading.grade_file import Grade
from mpkit.course.grading.handed_in import HandedIn
from mpkit.course.grading.roster import Roster, late_text
from mpkit.course.grading.student_page import student_page
from mpkit.course.predictions.questions import POINTS

__all__ = ["HEAD", "GradeReport", "leaderboard", "page_names"]


class GradeReport:
    """The table and the pages.

    Args:
        submissions: all notebooks; the table has their order and their exercises.
        table: the table's path; None: no table, and no page on the class, which lies beside it.
        pages: the folder of the students' pages; None: no pages.
        roster: all students; None: those who handed in something.
        due: when the notebooks were due; None: the roster may say so, student by student.
    """

    def __init__(
        self,
        submissions: Sequence[HandedIn],
        table: Path | None,
        pages: Path | None,
        roster: Roster | None = None,
        due: datetime | None = None,
    ) -> None:
        self._found, self._table, self._pages = submissions, table, pages
        self._roster, self._due = roster if roster is not None else Roster(), due
        self._entries = {entry.name: entry for each in submissions for entry in each.exercises}
        self._questions = list(dict.fromkeys(name for each in submissions for name in each.questions))
        self._grades: dict[str, Grade] = {}  # by notebook
        self._files = page_names([each.student for each in submissions])
        known = {plainly(each.student) for each in submissions}
        self._missing = [name for name in self._roster.names if plainly(name) not in known]

    def add(self, *grades: Grade) -> None:
        """Add grades to the table and the pages."""
        self._grades |= {grade.handed_in.name: grade for grade in grades}
        self._write(dict.fromkeys(grade.handed_in.student for grade in grades))

    def finish(self) -> list[Grade]:
        """Write the table and all pages once more; return the grades in order."""
        self._write(dict.fromkeys(each.student for each in self._found))
        return [self._grades[each.name] for each in self._found]

    def of_class(self) -> ClassReport:
        """Return what the class found hard, as far as it is graded."""
        theirs = self._theirs()
        shares = [points / most if most else 0.0 for points, most in map(_totals, theirs.values())]
        late = sum(bool(self._late(student, grades)) for student, grades in theirs.items())
        return class_report(list(self._entries.values()), theirs, shares, len(self._missing), late)

    def _theirs(self) -> dict[str, list[Grade]]:
        """Return the grades so far, by student."""
        theirs: dict[str, list[Grade]] = {}
        for each in self._found:
            if each.name in self._grades:
                theirs.setdefault(each.student, []).append(self._grades[each.name])
        return theirs

    def _write(self, students: dict[str, None]) -> None:
        theirs = self._theirs()
        if self._table is not None:
            _replace(self._table, self._rows(theirs))
            _replace(self._table.with_suffix(".class.html"), self.of_class().html())
            if board := list(leaderboard(self._entries.values(), theirs)):
                text = io.StringIO(newline="")
                rows = ((name, at, _plain(visible(who)), f"{score:.6g}") for name, at, who, score in board)
                csv.writer(text).writerows([HEAD, *rows])
                _replace(self._table.with_suffix(".leaderboard.csv"), text.getvalue())
        if self._pages is not None:
            self._pages.mkdir(parents=True, exist_ok=True)
            for student in students:
                grades = theirs[student]
                notes, late = self._odd(student, grades), self._late(student, grades)
                page = student_page(student, _totals(grades), grades, notes, late)
                _replace(self._pages / self._files[student], page)

    def _rows(self, theirs: dict[str, list[Grade]]) -> str:
        text = io.StringIO(newline="")
        table = csv.writer(text)
        dated = self._due is not None or bool(self._roster.extended)
        asked = [f"predict {name}" for name in self._questions]
        table.writerow(
            ["student", "points", "of", *(["late"] if dated else []), *self._entries, *asked, "notes"]
        )
        for student, grades in theirs.items():
            points = [_points(grades, entry) for entry in self._entries.values()]
            points += [_prediction_points(grades, name) for name in self._questions]
            notes = [note for grade in grades for note in grade.all_notes] + self._odd(student, grades)
            late = [late_text(self._late(student, grades))] if dated else []
            said = _plain("; ".join(map(visible, notes)))
            table.writerow([_plain(student), *_totals(grades), *late, *points, said])
        most = sum(entry.exercise.points for entry in self._entries.values()) + POINTS * len(self._questions)
        for name in self._missing:
            empty = [""] * (len(self._entries) + len(self._questions) + dated)
            table.writerow([_plain(visible(name)), 0, most, *empty, "handed in nothing"])
        return text.getvalue()

    def _late(self, student: str, grades: Sequence[Grade]) -> timedelta:
        """Return how late the last of a student's notebooks was."""
        return max(self._roster.late(student, grade.handed_in.at, self._due) for grade in grades)

    def _odd(self, student: str, grades: Sequence[Grade]) -> list[str]:
        """Return notes on what is odd about a student's name and notebooks."""
        notes = []
        names = [grade.handed_in.name for grade in grades]
        answers = Counter(entry.name for grade in grades for entry in grade.handed_in.exercises)
        if max(answers.values(), default=0) > 1:
            notes.append(
                f"{len(names)} notebooks answer the same exercises, of each the best counts: {', '.join(names)}"
            )
        others = dict.fromkeys(
            each.student for each in self._found if plainly(each.student) == plainly(student)
        )
        alike = [name for name in others if name != student]
        if alike:
            notes.append(
                f"perhaps the same student as {', '.join(map(repr, alike))}, who has a row of their own"
            )
        if self._roster.names and student not in self._roster:
            notes.append("not in the roster")
        return notes


def page_names(students: Sequence[str]) -> dict[str, str]:
    """Return a distinct file name for each student's page, distinct also where case is ignored.

    >>> page_names(["ada", "Kim Lee", "Kim_Lee"])
    {'ada': 'ada.html', 'Kim Lee': 'Kim_Lee-54b08251.html', 'Kim_Lee': 'Kim_Lee-b7c65914.html'}
    """
    slugs = {student: re.sub(r"[^\w.-]", "_", student)[:80] for student in students}
    many = Counter(slug.casefold() for slug in slugs.values())

    def name(student: str, slug: str) -> str:
        if slug == student and many[slug.casefold()] == 1 and not slug.startswith("."):
            return f"{slug}.html"
        return f"{slug}-{hashlib.sha256(student.encode()).hexdigest()[:8]}.html"

    return {student: name(student, slug) for student, slug in slugs.items()}


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", newline="")
    partial.replace(path)


def _totals(grades: Sequence[Grade]) -> tuple[int, int]:
    """Return the points and the highest possible number; of an exercise in several notebooks the best counts."""
    entries = {entry.name: entry for grade in grades for entry in grade.handed_in.exercises}
    questions = dict.fromkeys(name for grade in grades for name in grade.predictions)
    best = sum(max(grade.points(name) for grade in grades) for name in entries)
    best += sum(max(grade.points_predicted(name) for grade in grades) for name in questions)
    return best, sum(entry.exercise.points for entry in entries.values()) + POINTS * len(questions)


def _points(grades: Sequence[Grade], entry: ExerciseEntry) -> int | str:
    asked = [grade for grade in grades if entry.name in grade.checked]
    most = max(grade.points(entry.name) for grade in asked) if asked else ""
    return most or (most if all(grade.is_judged(entry.name) for grade in asked) else "not judged")


def _prediction_points(grades: Sequence[Grade], name: str) -> int | str:
    asked = [grade.points_predicted(name) for grade in grades if name in grade.predictions]
    return max(asked) if asked else ""


def _plain(text: str) -> str:
    """Return a table cell's text so that no spreadsheet takes it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


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
