"""A student's page for the instructor: points, what each answer did, hints, and what the student wrote about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from mpkit.common.safe_text import escape
from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.checked_html import checked_html
from mpkit.course.grading.grade_file import Grade
from mpkit.course.grading.roster import late_text
from mpkit.course.predictions.amounts import spell_amount
from mpkit.course.predictions.questions import POINTS, question
from mpkit.views.theme import ACCENT, STATUS, page_style

__all__ = ["student_page"]

STYLE = (
    "section{border-top:1px solid var(--jp-border-color2);padding:12px 0}h1{font-size:22px}h2{font-size:17px}"
    f".late{{background:{STATUS['bad']};color:#fff;border-radius:9px;padding:1px 9px;font-size:13px}}"
    f"blockquote{{white-space:pre-wrap;border-left:4px solid {ACCENT};margin:8px 0;padding:2px 12px}}"
)


def student_page(
    student: str, points: tuple[int, int], grades: Sequence[Grade], notes: Sequence[str], late: timedelta
) -> str:
    """Return the page as HTML, with every string escaped.

    Args:
        student: the student's name.
        points: the points, and the highest possible number.
        grades: the grades of the student's notebooks.
        notes: what is odd about them together.
        late: how late the student was.
    """
    mark = f' <span class="late">{late_text(late)}</span>' if late else ""
    parts = [f"<h1>{escape(student)}: {points[0]} of {points[1]} points{mark}</h1>"]
    parts += [f"<p><b>{escape(note)}</b></p>" for note in notes]
    for grade in grades:
        parts.append(f"<h2>{escape(grade.handed_in.name)}: {grade.total} of {grade.most}</h2>")
        parts += [f"<p><b>{escape(note)}</b></p>" for note in grade.notes]
        parts += [f"<section>{_exercise(grade, entry)}</section>" for entry in grade.handed_in.exercises]
        parts += [f"<section>{_prediction(grade, name)}</section>" for name in grade.predictions]
        about = [text for name, text in grade.handed_in.written if name not in grade.checked]
        parts += [_justification_html(text) for text in about]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(student)}</title>'
        f"<style>{page_style()}{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>"
    )


def _exercise(grade: Grade, entry: ExerciseEntry) -> str:
    """Return the verdict on one answer; how many tries it took is said only if it is known."""
    checked, remark = grade.checked.get(entry.name), grade.remarks.get(entry.name, "")
    tries = grade.handed_in.tries.get(entry.name, 0)
    if checked is None:
        said = f"<b>{escape(entry.text.title)}</b>: {escape(remark or 'no answer was found')}"
    else:
        said = checked_html(replace(checked, tries=max(tries, 1)))
        if tries > 1 and not checked.passed:
            said += f"<p>After {tries} tries, as the notebook says.</p>"
        said += f"<p><b>{escape(remark)}</b></p>" if remark else ""
    return said + "".join(
        _justification_html(text) for name, text in grade.handed_in.written if name == entry.name
    )


def _prediction(grade: Grade, name: str) -> str:
    asked, value = question(name), grade.predictions[name]
    head = f"<b>Prediction of {escape(name)}: {grade.points_predicted(name)} of {POINTS} points</b>"
    truth = asked.truth()
    said = (
        "none was made" if value is None else f"{spell_amount(value, asked.unit)}, {asked.gap(value, truth)}"
    )
    right = spell_amount(truth, asked.unit)
    return f"{head}<p>{escape(asked.text)}<br>Predicted: {escape(said)}; it is {escape(right)}.</p>"


def _justification_html(text: str) -> str:
    return f"<p>The student's justification:</p><blockquote>{escape(text)}</blockquote>"
