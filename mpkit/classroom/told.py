"""What a check found, as plain data: from the process that judges to the one that writes reports, and its files."""

from __future__ import annotations

from typing import Any

from mpkit.classroom.catalogue import Entry
from mpkit.classroom.exercise import Case, Row
from mpkit.classroom.judge import Checked
from mpkit.classroom.seen import Seen

__all__ = ["checked_of", "told"]

MOST, LONGEST = 200, 2000
"""Lines that ranks printed, and characters of a text."""


def told(checked: Checked) -> dict[str, Any]:
    """Return it as JSON's types: what of a row its case was is a number, timelines are left out."""
    cases: list[Case | None] = []
    rows = []
    for row in checked.rows:
        case = row.seen.case if row.seen is not None else None
        if case not in cases:
            cases.append(case)
        words = [text[:LONGEST] for text in (row.what, row.expected, row.got)]
        rows.append([*words, row.ok, cases.index(case) if case is not None else None])
    return {
        "rows": rows,
        "mistake": checked.mistake,
        "lesson": list(checked.lesson),
        "hint": checked.hint,
        "printed": [line[:LONGEST] for line in checked.printed[:MOST]],
    }


def checked_of(entry: Entry, values: dict[str, Any]) -> Checked:
    """Return what `told` told; it passed if every row did.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    rows = []
    for what, expected, got, ok, case in values["rows"]:
        seen = Seen(Case(0, seed=int(case))) if case is not None else None
        rows.append(Row(str(what), str(expected), str(got), ok is True, seen))
    if not rows:
        raise ValueError("a verdict on nothing")
    return Checked(
        entry.name, entry.source.title, tuple(rows), all(row.ok for row in rows), str(values["mistake"]),
        tuple(map(str, values["lesson"])), str(values["hint"]), 1, tuple(map(str, values["printed"])),
    )  # fmt: skip
