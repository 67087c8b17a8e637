"""Reports for instructors: a table of the class (CSV), a page per student (HTML) with hints, and what the class found
hard, as text. Table and pages grow notebook by notebook, and are complete whenever somebody opens them.

No two students share a row or a page: unless a name is a file's name by itself, its page's name also has a part of its
digest.
"""

import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from mpkit.common.disk import write_whole
from mpkit.common.safe_text import escape, visible
from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.grading.grades import Grade, totals
from mpkit.course.grading.submissions import HandedIn
from mpkit.course.judge import UNCOUNTED
from mpkit.course.verdict import Checked, checked_html
from mpkit.views.theme import page_style


class GradeReport:
    """The table and the pages.

    Args:
        submissions: all notebooks; the table has their order and their exercises.
        table: the table's path; the pages' folder has the same name without its ending.
    """

    def __init__(self, submissions: Sequence[HandedIn], table: Path) -> None:
        self._submissions, self._table = submissions, table
        self._entries = {entry.name: entry for each in submissions for entry in each.exercises}
        self._grades: dict[str, Grade] = {}  # by notebook

    def add(self, *grades: Grade) -> None:
        """Add grades to the table and the pages."""
        self._grades |= {grade.handed_in.name: grade for grade in grades}
        self._write({grade.handed_in.student for grade in grades})

    def finish(self) -> None:
        """Write the table and all pages once more, as a notebook may have changed them in the meantime."""
        self._write({each.student for each in self._submissions})

    def summary(self) -> str:
        """Return what the class found hard: points, and for each exercise who solved it and the common mistakes."""
        by_student = self._by_student()
        shares = [100 * points / most if most else 0.0 for points, most in map(totals, by_student.values())]
        rows = [("exercise", "solved", "most common mistakes")]
        rows += [_class_row(entry, by_student) for entry in self._entries.values()]
        wide = [max(len(row[i]) for row in rows) for i in range(2)]
        head = (
            f"{len(shares)} students; points: {mean(shares):.0f} % on average, median {median(shares):.0f} %"
        )
        return "\n".join([head, "", *(f"{a:{wide[0]}}  {b:{wide[1]}}  {c}" for a, b, c in rows)])

    def _by_student(self) -> dict[str, list[Grade]]:
        """Return the grades so far, by student."""
        by_student: dict[str, list[Grade]] = {}
        for each in self._submissions:
            if each.name in self._grades:
                by_student.setdefault(each.student, []).append(self._grades[each.name])
        return by_student

    def _write(self, students: set[str]) -> None:
        by_student = self._by_student()
        write_whole(self._table, self._rows(by_student).encode())
        pages = self._table.with_suffix("")
        pages.mkdir(exist_ok=True)
        for student in students:
            write_whole(pages / page_name(student), _student_page(student, by_student[student]).encode())

    def _rows(self, by_student: Mapping[str, Sequence[Grade]]) -> str:
        text = io.StringIO(newline="")
        table = csv.writer(text)
        table.writerow(["student", "points", "of", *self._entries, "notes"])
        for student, grades in by_student.items():
            points = [_points(grades, name) for name in self._entries]
            notes = "; ".join(visible(note) for grade in grades for note in grade.all_notes)
            table.writerow([_plain(student), *totals(grades), *points, _plain(notes)])
        return text.getvalue()


def page_name(student: str) -> str:
    """Return the file name of a student's page.

    >>> page_name("ada"), page_name("Kim Lee"), page_name("Kim/Lee")
    ('ada.html', 'Kim_Lee-54b08251.html', 'Kim_Lee-8aa5b59c.html')
    """
    slug = re.sub(r"[^\w.-]", "_", student)[:80]
    return (
        f"{slug}.html"
        if slug == student
        else f"{slug}-{hashlib.sha256(student.encode()).hexdigest()[:8]}.html"
    )


def _points(grades: Sequence[Grade], name: str) -> int | str:
    """Return the cell of an exercise: the points, of several notebooks the most; "" if it was not asked for."""
    asked = [grade for grade in grades if name in grade.checked]
    if not asked:
        return ""
    most = max(grade.points(name) for grade in asked)
    return most or (most if all(grade.is_judged(name) for grade in asked) else "not judged")


def _plain(text: str) -> str:
    """Return a table cell's text so that no spreadsheet takes it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


# ---- a student's page

STYLE = (
    "section{border-top:1px solid var(--jp-border-color2);padding:12px 0}h1{font-size:22px}h2{font-size:17px}"
)


def _student_page(student: str, grades: Sequence[Grade]) -> str:
    """Return a student's page: points, what each answer did, and hints."""
    title = f"{escape(student)}: {{}} of {{}} points".format(*totals(grades))
    body = f"<h1>{title}</h1>"
    for grade in grades:
        body += f"<h2>{escape(grade.handed_in.name)}: {{}} of {{}}</h2>".format(*totals([grade]))
        body += "".join(f"<p><b>{escape(note)}</b></p>" for note in grade.notes)
        body += "".join(
            f"<section>{_exercise_html(grade, entry)}</section>" for entry in grade.handed_in.exercises
        )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{page_style()}{STYLE}</style></head><body><main>{body}</main></body></html>"
    )


def _exercise_html(grade: Grade, entry: ExerciseEntry) -> str:
    """Return the verdict on one answer; how many tries it took is not known here."""
    checked, remark = grade.checked.get(entry.name), grade.remarks.get(entry.name, "")
    if checked is None:
        return f"<b>{escape(entry.text.title)}</b>: {escape(remark or 'no answer was found')}"
    return checked_html(replace(checked, tries=1)) + (f"<p><b>{escape(remark)}</b></p>" if remark else "")


# ---- the class


def _class_row(entry: ExerciseEntry, by_student: Mapping[str, Sequence[Grade]]) -> tuple[str, str, str]:
    """Return a row of the summary; each student counts once, with the best of several notebooks."""
    asked = [
        [grade.checked[entry.name] for grade in grades if entry.name in grade.checked]
        for grades in by_student.values()
    ]
    best = [max(verdicts, key=_rank) for verdicts in asked if verdicts]
    mistakes = Counter(each.mistake for each in best if each is not None and not each.passed)
    named = [f"{name} ({many})" for name, many in mistakes.most_common() if name not in ("", *UNCOUNTED)]
    solved = sum(each is not None and each.passed for each in best)
    return entry.name, f"{solved} of {len(best)}", ", ".join(named[:3]) or "none seen"


def _rank(checked: Checked | None) -> tuple[bool, bool]:
    """Order verdicts: a right answer is best, then one that was judged."""
    return checked is not None and checked.passed, checked is not None and not checked.not_judged
