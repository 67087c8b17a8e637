"""Reports for instructors: a table of the class (CSV), and a page per student (HTML) with hints. Both grow row by row.

The table is replaced as a whole by a longer one, so that it is complete whenever somebody opens it. No two students
share a row or a page: if two names would give the same file name, each file name also has a part of its name's digest.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mpkit.classroom.catalogue import Entry
from mpkit.classroom.checked_html import checked_html
from mpkit.classroom.grading.handed_in import HandedIn
from mpkit.classroom.grading.kept import Grade
from mpkit.support.visible import escape, visible

__all__ = ["Report", "read_roster"]


class Report:
    """The table and the pages.

    Args:
        found: all notebooks; the table has their order and their exercises.
        table: the table's path; None: no table.
        pages: the folder of the pages; None: no pages.
        roster: the names of all students; none: those who handed in something.
    """

    def __init__(
        self,
        submissions: Sequence[HandedIn],
        table: Path | None,
        pages: Path | None,
        roster: Sequence[str] = (),
    ) -> None:
        self._found, self._table, self._pages = submissions, table, pages
        self._entries = {entry.name: entry for each in submissions for entry in each.exercises}
        self._grades: dict[str, Grade] = {}  # by notebook
        self._files = page_names([each.student for each in submissions])
        known = Counter(_plainly(each.student) for each in submissions)
        self._missing = [name for name in roster if _plainly(name) not in known]
        expected = {_plainly(name) for name in roster}
        self._odd = {
            each.student for each in submissions if roster and _plainly(each.student) not in expected
        }

    def add(self, *grades: Grade) -> None:
        """Add grades to the table and the pages."""
        self._grades |= {grade.handed_in.name: grade for grade in grades}
        self._write(dict.fromkeys(grade.handed_in.student for grade in grades))

    def finish(self) -> list[Grade]:
        """Write the table and all pages once more; return the grades in order."""
        self._write(dict.fromkeys(each.student for each in self._found))
        return [self._grades[each.name] for each in self._found]

    def _write(self, students: dict[str, None]) -> None:
        theirs: dict[str, list[Grade]] = {}
        for each in self._found:
            if each.name in self._grades:
                theirs.setdefault(each.student, []).append(self._grades[each.name])
        if self._table is not None:
            _replace(self._table, self._rows(theirs))
        if self._pages is not None:
            self._pages.mkdir(parents=True, exist_ok=True)
            for student in students:
                _replace(self._pages / self._files[student], _page(student, theirs[student]))

    def _rows(self, theirs: dict[str, list[Grade]]) -> str:
        text = io.StringIO(newline="")
        table = csv.writer(text)
        table.writerow(["student", "points", "of", *self._entries, "notes"])
        for student, grades in theirs.items():
            points = [_points(grades, entry) for entry in self._entries.values()]
            notes = [note for grade in grades for note in grade.all_notes]
            notes += ["not in the roster"] if student in self._odd else []
            total, most = _totals(grades)
            table.writerow([_plain(student), total, most, *points, _plain("; ".join(map(visible, notes)))])
        most = sum(entry.exercise.points for entry in self._entries.values())
        for name in self._missing:
            table.writerow([_plain(visible(name)), 0, most, *[""] * len(self._entries), "handed in nothing"])
        return text.getvalue()


def read_roster(path: Path) -> list[str]:
    """Return the names in a file: one per line, or from a CSV's column "student" or "name", or else its first column.

    Raises:
        ValueError: The file cannot be read, or has no name in it.
    """
    try:
        rows = [row for row in csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"))) if any(row)]
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"--roster {path} cannot be read: {error}") from None
    heads = [cell.strip().lower() for cell in rows[0]] if rows else []
    column = next((heads.index(name) for name in ("student", "name") if name in heads), None)
    body = rows if column is None else rows[1:]
    names = [row[column or 0].strip() for row in body if len(row) > (column or 0)]
    if not any(names):
        raise ValueError(
            f"--roster {path} has no name in it: one per line is wanted, or a table with a column 'student'"
        )
    return list(dict.fromkeys(name for name in names if name))


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


def _page(student: str, grades: Sequence[Grade]) -> str:
    total, most = _totals(grades)
    parts = [f"<h1>{escape(student)}: {total} of {most} points</h1>"]
    for grade in grades:
        parts.append(f"<h2>{escape(grade.handed_in.name)}: {grade.total} of {grade.most}</h2>")
        parts += [f"<p><b>{escape(note)}</b></p>" for note in grade.notes]
        for entry in grade.handed_in.exercises:
            checked, remark = grade.checked.get(entry.name), grade.remarks.get(entry.name, "")
            said = f"<p><b>{escape(remark)}</b></p>" if remark and checked is not None else ""
            if checked is not None:
                parts.append(f"<section>{checked_html(checked)}{said}</section>")
            else:
                words = escape(remark or "no answer was found")
                parts.append(f"<section><b>{escape(entry.source.title)}</b>: {words}</section>")
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:2em auto;padding:0 1em;color:#1f2328}"
        "section{border-top:1px solid #d0d7de;padding:12px 0}h1{font-size:22px}h2{font-size:17px}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(student)}</title>'
        f"<style>{style}</style></head><body>{''.join(parts)}</body></html>"
    )


def _totals(grades: Sequence[Grade]) -> tuple[int, int]:
    """Return the points and the highest possible number; of an exercise in several notebooks the best counts."""
    entries = {entry.name: entry for grade in grades for entry in grade.handed_in.exercises}
    best = sum(max(grade.points(name) for grade in grades) for name in entries)
    return best, sum(entry.exercise.points for entry in entries.values())


def _points(grades: Sequence[Grade], entry: Entry) -> int | str:
    asked = [grade for grade in grades if entry in grade.handed_in.exercises]
    return max(grade.points(entry.name) for grade in asked) if asked else ""


def _plainly(name: str) -> str:
    """Return a name as it is compared with the roster: "Kim_Lee" is "kim lee"."""
    return " ".join(name.replace("_", " ").split()).casefold()


def _plain(text: str) -> str:
    """Return a table cell's text so that no spreadsheet takes it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
