"""How long a student waits for a check, on a warm helper process: of each exercise its solution and every wrong answer.

The limits: 3 s, and 10 s for the longest. A check includes the solution's own run, for the picture.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from mpkit.classroom.catalogue import Entry, families, of_family
from mpkit.classroom.judge import judge
from mpkit.classroom.room import Answer, Room
from mpkit.classroom.source import run_cell

LIMIT, LONGEST = 3.0, 10.0


def seconds(entry: Entry, code: str, room: Room) -> float:
    """Of one check."""
    answer = Answer.of(run_cell(code, entry.exercise.name_of_answer, entry.name, entry.given))
    start = time.perf_counter()
    judge(entry, answer, room)
    return time.perf_counter() - start


def measure() -> list[dict[str, Any]]:
    """Rows for the table."""
    room = Room()
    rows = []
    try:
        for package in families():
            for entry in of_family(package.__name__.rsplit(".", 1)[1]):
                solved = median(seconds(entry, entry.source.plain, room) for _ in range(3))
                wrong = {
                    one.name: seconds(entry, entry.source.wrong(one), room) for one in entry.exercise.mistakes
                }
                slowest = max(wrong, key=wrong.__getitem__)
                rows.append(row(f"check of {entry.name}", solved, LIMIT, "3 s"))
                rows.append(row(f"{entry.name}, wrong: {slowest}", wrong[slowest], LONGEST, "10 s"))
    finally:
        room.close()
    return rows


def row(name: str, value: float, limit: float, words: str) -> dict[str, Any]:
    """A time beside what it may be at most."""
    return {
        "name": name,
        "value": value,
        "unit": "s",
        "ratio": value / limit,
        "against": f"the limit of {words}",
    }
