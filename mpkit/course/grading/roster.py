"""The roster of a class, and who was late.

    student,handed_in,due
    Ada,2026-11-20 22:10,
    Kim Lee,2026-11-21 08:00,2026-11-21

A time without a zone is local time. A due date without a time is the end of that day. A student's own due date, in the
column `due`, replaces that of the class: an extension.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from pathlib import Path

from mpkit.common.size_limits import read_text

__all__ = ["Roster", "due_date", "late_text", "moment", "plainly", "read_roster"]


@dataclass(frozen=True)
class Roster:
    """The students of a class.

    Attributes:
        names: the names of all students; none: nobody is missing.
        handed_in: by name as `plainly` has it, when a student has handed in, if the roster says so.
        extended: by name as `plainly` has it, the student's own due date.
    """

    names: tuple[str, ...] = ()
    handed_in: Mapping[str, datetime] = field(default_factory=dict)
    extended: Mapping[str, datetime] = field(default_factory=dict)

    def __contains__(self, student: str) -> bool:
        return plainly(student) in map(plainly, self.names)

    def late(self, student: str, at: datetime | None, due: datetime | None) -> timedelta:
        """Return how late a student is; no time if in time, or if there is no due date.

        Args:
            student: the student.
            at: when the file was handed in, which the roster overrules.
            due: the due date of the class.
        """
        name = plainly(student)
        due, at = self.extended.get(name, due), self.handed_in.get(name, at)
        return max(at - due, timedelta()) if at is not None and due is not None else timedelta()


def plainly(name: str) -> str:
    """Return a name as names are compared: "Kim_Lee" and "Kim Lee.ipynb" are "kim lee"."""
    return " ".join(name.removesuffix(".ipynb").replace("_", " ").split()).casefold()


def read_roster(path: Path) -> Roster:
    """Read names, one per line, or from a CSV's column "student" or "name", or else its first column.

    Raises:
        ValueError: The file cannot be read, has no name in it, or a time that cannot be read.
    """
    try:
        rows = [row for row in csv.reader(io.StringIO(read_text(path))) if any(row)]
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"--roster {path} cannot be read: {error}") from None
    heads = [cell.strip().lower().replace(" ", "_") for cell in rows[0]] if rows else []
    column = next((heads.index(name) for name in ("student", "name") if name in heads), None)
    names: dict[str, None] = {}
    times: dict[str, dict[str, datetime]] = {"handed_in": {}, "due": {}}
    for number, row in enumerate(rows):
        if column is not None and number == 0:
            continue
        name = row[column or 0].strip() if len(row) > (column or 0) else ""
        if not name:
            continue
        names[name] = None
        for head, kept in times.items():
            said = row[heads.index(head)].strip() if head in heads and len(row) > heads.index(head) else ""
            if said:
                where = f"--roster {path}, line {number + 1}, {head}"
                kept[plainly(name)] = due_date(said, where) if head == "due" else moment(said, where)
    if not names:
        raise ValueError(
            f"--roster {path} has no name in it: one per line is wanted, or a table with a column 'student'"
        )
    return Roster(tuple(names), times["handed_in"], times["due"])


def moment(text: str, where: str) -> datetime:
    """Return a point in time.

    >>> moment("2026-11-20 23:59+01:00", "--due").isoformat()
    '2026-11-20T23:59:00+01:00'
    >>> moment("20.11.2026", "--due")
    Traceback (most recent call last):
    ValueError: --due: '20.11.2026' is no time; such as 2026-11-20, '2026-11-20 23:59' or 2026-11-20T23:59+01:00

    Raises:
        ValueError: The text is no time.
    """
    try:
        found = datetime.fromisoformat(text.strip())
        return found if found.tzinfo is not None else found.astimezone()
    except (ValueError, OverflowError):  # of the year 1, for example
        raise ValueError(
            f"{where}: {text!r:.60} is no time; such as 2026-11-20, '2026-11-20 23:59' or 2026-11-20T23:59+01:00"
        ) from None


def due_date(text: str, where: str = "--due") -> datetime:
    """Return a due date: a day without a time is due at its end.

    >>> due_date("2026-11-20").strftime("%d %H:%M"), due_date("2026-11-20 12:00").strftime("%d %H:%M")
    ('20 23:59', '20 12:00')

    Raises:
        ValueError: The text is no time.
    """
    found = moment(text, where)
    if ":" in text or "T" in text:
        return found
    return datetime.combine(found.date(), time(23, 59, 59, 999_999)).astimezone()


def late_text(late: timedelta) -> str:
    """Return in words how late somebody is; "" for no time.

    >>> late_text(timedelta(days=1, hours=2, seconds=30)), late_text(timedelta(minutes=5)), late_text(timedelta())
    ('1 d 2 h late', '5 min late', '')
    """
    if not late:
        return ""
    minutes = max(int(late.total_seconds()) // 60, 1)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    parts = [f"{many} {unit}" for many, unit in ((days, "d"), (hours, "h"), (minutes, "min")) if many]
    return f"{' '.join(parts[:2])} late"
