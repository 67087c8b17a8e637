"""A verdict as plain data: it is sent from the judging process to the one that writes reports, and kept in files."""

from __future__ import annotations

from typing import Any

from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.framework.exercise import Case, CheckRow
from mpkit.course.framework.observation import Seen
from mpkit.course.judge import Checked

__all__ = ["checked_of", "verdict_json"]

MOST, LONGEST = 200, 2000
"""The most printed lines and the most characters per text that are kept."""


def verdict_json(checked: Checked) -> dict[str, Any]:
    """Return a verdict as JSON's types; the case of a row becomes a number, and timelines are left out."""
    cases: list[Case | None] = []
    rows = []
    for row in checked.rows:
        case = row.seen.case if row.seen is not None else None
        if case not in cases:
            cases.append(case)
        words = [text[:LONGEST] for text in (row.what, row.expected, row.got)]
        rows.append([*words, row.ok, cases.index(case) if case is not None else None, row.score])
    return {
        "rows": rows,
        "mistake": checked.mistake,
        "lesson": list(checked.lesson),
        "hint": checked.hint,
        "printed": [line[:LONGEST] for line in checked.printed[:MOST]],
    }


def checked_of(entry: ExerciseEntry, values: dict[str, Any]) -> Checked:
    """Return the verdict that `verdict_json` wrote; it passed if every row did.

    Raises:
        KeyError, TypeError, ValueError: The values were not written by `verdict_json`.
    """
    rows = []
    for what, expected, got, ok, case, score in values["rows"]:
        seen = Seen(Case(0, seed=int(case))) if case is not None else None
        number = None if score is None else float(score)
        rows.append(CheckRow(str(what), str(expected), str(got), ok is True, seen, number))
    if not rows:
        raise ValueError("a verdict on nothing")
    return Checked(
        entry.name, entry.text.title, tuple(rows), all(row.ok for row in rows), str(values["mistake"]),
        tuple(map(str, values["lesson"])), str(values["hint"]), 1, tuple(map(str, values["printed"])),
    )  # fmt: skip
