"""How long a student waits for a check on a warm helper process: each exercise's solution and every wrong answer.

The limits are 3 s, and 10 s for the longest. A check includes a run of the solution, for the picture.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from mpkit.course.catalogue import ExerciseEntry, families, of_family
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.source import run_cell
from mpkit.course.judge import judge

LIMIT, LONGEST = 3.0, 10.0


def seconds(entry: ExerciseEntry, code: str, room: Room) -> float:
    """Return the seconds of one check."""
    answer = PackedAnswer.pack(run_cell(code, entry.exercise.name_of_answer, entry.name, entry.given_code))
    start = time.perf_counter()
    judge(entry, answer, room)
    return time.perf_counter() - start


def measure() -> list[dict[str, Any]]:
    """Return rows for the table."""
    room = Room()
    rows = []
    try:
        for package in families():
            for entry in of_family(package.__name__.rsplit(".", 1)[1]):
                solved = median(seconds(entry, entry.source.plain, room) for _ in range(3))
                wrong = {one.name: seconds(entry, one.wrong, room) for one in entry.exercise.mistakes}
                slowest = max(wrong, key=wrong.__getitem__)
                rows.append(row(f"check of {entry.name}", solved, LIMIT, "3 s"))
                rows.append(row(f"{entry.name}, wrong: {slowest}", wrong[slowest], LONGEST, "10 s"))
    finally:
        room.close()
    return rows


def row(name: str, value: float, limit: float, words: str) -> dict[str, Any]:
    """Return a row of the table: a time beside the most that it may be."""
    return {
        "name": name,
        "value": value,
        "unit": "s",
        "ratio": value / limit,
        "against": f"the limit of {words}",
    }
