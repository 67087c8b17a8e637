"""What an instructor gets: a table of the class (CSV), and a page a student (HTML) with hints."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mpkit.classroom.catalogue import Entry
from mpkit.classroom.grading.grade import Grade
from mpkit.views.checked_html import checked_html

__all__ = ["write_pages", "write_table"]


def write_table(grades: Sequence[Grade], path: Path) -> None:
    """A row a student: points, of how many, points by exercise, notes. Several notebooks of one are added up."""
    entries = {entry.name: entry for grade in grades for entry in grade.handed_in.exercises}
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["student", "points", "of", *entries, "notes"])
        for student, theirs in _by_student(grades).items():
            points = [_points(theirs, entry) for entry in entries.values()]
            total, most = sum(grade.total for grade in theirs), sum(grade.most for grade in theirs)
            notes = "; ".join(note for grade in theirs for note in grade.notes)
            table.writerow([_plain(student), total, most, *points, _plain(notes)])


def write_pages(grades: Sequence[Grade], folder: Path) -> None:
    """A page a student."""
    folder.mkdir(parents=True, exist_ok=True)
    for student, theirs in _by_student(grades).items():
        name = re.sub(r"[^\w.-]", "_", student)
        (folder / f"{name}.html").write_text(_page(student, theirs), encoding="utf-8")


def _page(student: str, grades: Sequence[Grade]) -> str:
    total, most = sum(grade.total for grade in grades), sum(grade.most for grade in grades)
    parts = [f"<h1>{escape(student)}: {total} of {most} points</h1>"]
    for grade in grades:
        parts.append(f"<h2>{escape(grade.handed_in.path.name)}: {grade.total} of {grade.most}</h2>")
        parts += [f"<p><b>{escape(note)}</b></p>" for note in grade.notes]
        for entry in grade.handed_in.exercises:
            checked = grade.checked.get(entry.name)
            if checked is not None:
                parts.append(f"<section>{checked_html(checked)}</section>")
            else:
                parts.append(f"<section><b>{escape(entry.source.title)}</b>: no answer was found</section>")
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:2em auto;padding:0 1em;color:#1f2328}"
        "section{border-top:1px solid #d0d7de;padding:12px 0}h1{font-size:22px}h2{font-size:17px}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(student)}</title>'
        f"<style>{style}</style></head><body>{''.join(parts)}</body></html>"
    )


def _by_student(grades: Sequence[Grade]) -> dict[str, list[Grade]]:
    found: dict[str, list[Grade]] = {}
    for grade in grades:
        found.setdefault(grade.handed_in.student, []).append(grade)
    return found


def _points(grades: Sequence[Grade], entry: Entry) -> int | str:
    asked = [grade for grade in grades if entry in grade.handed_in.exercises]
    return max(grade.points(entry) for grade in asked) if asked else ""


def _plain(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" else text
