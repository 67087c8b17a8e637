"""What a class found hard: which exercise costs most tries, which misconception is most common, how points spread.

A student counts once per exercise, with the best of several notebooks. Tries are known where a notebook was handed in
with its outputs, or with the student's file of progress; they are what the notebook says, and cost no points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from mpkit.common.safe_text import escape, visible
from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.framework.frugal import LOOP, WASTEFUL
from mpkit.course.grading.grade_file import Grade
from mpkit.course.judge import UNCOUNTED
from mpkit.views.theme import ACCENT, page_style

__all__ = ["ClassReport", "Hardness", "class_report"]

STEPS = 10
"""The number of parts in which points are counted: 0 to 9 %, 10 to 19 %, ..., and all points."""


@dataclass(frozen=True)
class Hardness:
    """How a class did in one exercise.

    Attributes:
        name: the exercise's name.
        asked: how many students should have answered it.
        answered: how many answers were judged.
        solved: how many were right.
        tries: the tries of each student of whom they are known.
        mistakes: how often each misconception shows, the most common first.
        hints: the first hint for each misconception.
    """

    name: str
    asked: int
    answered: int
    solved: int
    tries: tuple[int, ...]
    mistakes: tuple[tuple[str, int], ...]
    hints: Mapping[str, str]

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row of the table."""
        tries = f"{mean(self.tries):.1f} (of {len(self.tries)} students)" if self.tries else "unknown"
        mistakes = ", ".join(f"{name} ({many})" for name, many in self.mistakes[:3]) or "none seen"
        return self.name, f"{self.solved} of {self.asked}", tries, mistakes


@dataclass(frozen=True)
class ClassReport:
    """A class in a page; `str()` gives it as text.

    Attributes:
        shares: each student's share of the points, from 0 to 1.
        missing: how many of the roster have handed in nothing.
        late: how many were late.
        exercises: the exercises in their order.
    """

    shares: tuple[float, ...]
    missing: int
    late: int
    exercises: tuple[Hardness, ...]

    @property
    def spread(self) -> list[tuple[str, int]]:
        """The number of students by their share of the points."""
        parts = Counter(min(int(share * STEPS + 1e-9), STEPS) for share in self.shares)
        words = [f"{100 * i // STEPS} to {100 * (i + 1) // STEPS - 1} %" for i in range(STEPS)]
        return [(word, parts[i]) for i, word in enumerate([*words, "all points"])]

    @property
    def summary(self) -> list[str]:
        """What an instructor asks first, in sentences."""
        many = len(self.shares)
        first = f"{many} student{'s have' if many != 1 else ' has'} handed in"
        not_yet, late = "has" if self.missing == 1 else "have", "was" if self.late == 1 else "were"
        said = [f"{first}, {self.missing} {not_yet} not, {self.late} {late} late."]
        if self.shares:
            shares = [100 * share for share in self.shares]
            said.append(f"Points: {mean(shares):.0f} % on average, median {median(shares):.0f} %.")
        known = [each for each in self.exercises if each.tries]
        if known:
            most = max(known, key=lambda each: mean(each.tries))
            said.append(f"{most.name} costs most tries: {mean(most.tries):.1f} on average.")
        made = [(many, each, name) for each in self.exercises for name, many in each.mistakes]
        if made:
            many, each, name = max(made, key=lambda one: one[0])
            answers = f"{many} answer{'s' if many > 1 else ''}"
            said.append(
                f"The most common misconception is {name}, in {answers} to {each.name}: {each.hints[name]}"
            )
        return said

    def __str__(self) -> str:
        rows = [
            ("exercise", "solved", "tries on average", "mistakes"),
            *(each.cells for each in self.exercises),
        ]
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        table = ["  ".join([*(row[i].ljust(wide[i]) for i in range(3)), row[3]]) for row in rows]
        spread = [f"{word:>10}  {'█' * many} {many}" for word, many in self.spread]
        return "\n".join([*self.summary, "", *spread, "", *table])

    def html(self) -> str:
        """Return the report as a page."""
        said = "".join(f"<p>{escape(line)}</p>" for line in self.summary)
        most = max([many for _, many in self.spread], default=1) or 1
        bars = "".join(
            f'<tr><th scope="row">{escape(word)}</th><td><span class="bar" style="width:{300 * many // most}px">'
            f"</span> {many}</td></tr>"
            for word, many in self.spread
        )
        heads = "".join(
            f'<th scope="col">{word}</th>' for word in ("exercise", "solved", "tries on average", "mistakes")
        )
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(visible(cell))}</td>" for cell in each.cells) + "</tr>"
            for each in self.exercises
        )
        style = (
            page_style()
            + "table{border-collapse:collapse;margin:1em 0}th,td{text-align:left;padding:3px 14px 3px 0;"
            "font-weight:400}.bar{display:inline-block;height:11px;background:"
            f"{ACCENT}}}thead th{{color:var(--jp-ui-font-color2);border-bottom:1px solid var(--jp-border-color2)}}"
        )
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>The class</title><style>{style}'
            f"</style></head><body><main><h1>The class</h1>{said}<h2>Points</h2><table><tbody>{bars}</tbody></table>"
            f"<h2>Exercises</h2><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></main></body></html>"
        )


def class_report(
    entries: Sequence[ExerciseEntry], theirs: Mapping[str, Sequence[Grade]], shares: Sequence[float], missing: int,
    late: int,
) -> ClassReport:  # fmt: skip
    """Count over a class.

    Args:
        entries: the exercises in their order.
        theirs: the grades of each student's notebooks.
        shares: each student's share of the points.
        missing: how many of the roster have handed in nothing.
        late: how many were late.
    """
    return ClassReport(tuple(shares), missing, late, tuple(_hardness(entry, theirs) for entry in entries))


def _hardness(entry: ExerciseEntry, theirs: Mapping[str, Sequence[Grade]]) -> Hardness:
    asked = [[grade for grade in grades if entry.name in grade.checked] for grades in theirs.values()]
    asked = [grades for grades in asked if grades]
    best = [max(grades, key=lambda grade: _rank(grade, entry.name)) for grades in asked]
    found = [checked for grade in best if (checked := grade.checked.get(entry.name)) is not None]
    judged = [checked for checked in found if not checked.not_judged]
    tries = [max(grade.handed_in.tries.get(entry.name, 0) for grade in grades) for grades in asked]
    wrong = [checked.mistake for checked in judged if not checked.passed]
    mistakes = Counter(mistake for mistake in wrong if mistake not in ("", *UNCOUNTED))
    first = {mistake.name: mistake.hints[0] for mistake in (*entry.exercise.mistakes, *WASTEFUL, LOOP)}
    hints = {name: first.get(name, entry.exercise.start) for name in mistakes}
    return Hardness(
        entry.name, len(asked), len(judged), sum(checked.passed for checked in judged),
        tuple(many for many in tries if many), tuple(mistakes.most_common()), hints,
    )  # fmt: skip


def _rank(grade: Grade, name: str) -> tuple[bool, bool]:
    """Return how good a notebook's answer is: a right one is best, a judged one better than none."""
    checked = grade.checked.get(name)
    return checked is not None and checked.passed, checked is not None and not checked.not_judged
