"""A checked answer as text."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

from mpkit.course.answer_status import ANSWERED, NOT_ANSWERED

if TYPE_CHECKING:
    from mpkit.course.judge import Checked

__all__ = ["checked_text", "score_words", "verdict"]

WIDTH = 100
MOST_LINES = 12
"""The most lines shown of what the ranks printed."""


def verdict(checked: Checked) -> str:
    """Return the verdict in a few words."""
    if checked.not_judged:
        return "not judged: busy"
    if checked.exam:
        return ANSWERED if checked.has_answer else NOT_ANSWERED
    if checked.passed:
        return "solved" + (f", at the {_ordinal(checked.tries)} try" if checked.tries > 1 else "")
    return "not yet" + (": the same answer as before, and no new try" if checked.again else "")


def checked_text(checked: Checked) -> str:
    """Return the verdict, the table, what happened, and the hint."""
    lines = [f"{checked.title}: {verdict(checked)}", ""]
    cells = [
        ("what was checked", "expected", "got"),
        *((row.what, row.expected, row.got) for row in checked.rows),
    ]
    marks = [" ", *("✔" if row.ok else "✗" for row in checked.rows)]
    wide = [max(len(each[i]) for each in cells) for i in range(2)]
    for mark, (what, expected, got) in zip(marks, cells, strict=True):
        lines.append(f"{mark} {what:{wide[0]}}  {expected:{wide[1]}}  {got}")
    if checked.score is not None:
        lines += ["", score_words(checked.score)]
    for paragraph in checked.lesson:
        lines += ["", *(_wrap_text(line) for line in paragraph.splitlines())]
    if checked.hint:
        lines += ["", fill(f"Hint: {checked.hint}", WIDTH)]
    return "\n".join(lines)


def score_words(score: float) -> str:
    """Return a score in words."""
    return f"Your score for the leaderboard: {score:.6g}. A smaller one is better."


def _wrap_text(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return fill(line, WIDTH, subsequent_indent=indent + "    ")


def _ordinal(n: int) -> str:
    last = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return {1: "first", 2: "second", 3: "third"}.get(n, f"{n}{last}")
