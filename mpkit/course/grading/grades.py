"""The grade of a notebook, and the grades so far in a file, so that a stopped grading can continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from inspect import getsource
from pathlib import Path
from typing import Any

from mpkit.course.grading.submissions import HandedIn
from mpkit.course.predictions.questions import POINTS, question
from mpkit.course.sandbox.guard import Guard
from mpkit.course.verdict import Checked, checked_of, verdict_json

__all__ = ["Grade", "GradeStore", "key_of", "totals"]


class Grade:
    """The grade of one notebook.

    Attributes:
        handed_in: the notebook.
        checked: the verdict on each exercise; None if there was none.
        notes: what went wrong with the notebook as a whole, or with its cells.
        remarks: by exercise, why there was no verdict.
        predictions: by question, the prediction; None if there was none.
    """

    def __init__(
        self, handed_in: HandedIn, checked: Mapping[str, Checked | None], notes: Sequence[str] = (),
        remarks: Mapping[str, str] | None = None, predictions: Mapping[str, float | None] | None = None,
    ) -> None:  # fmt: skip
        self.handed_in = handed_in
        self.checked = dict(checked)
        self.notes = tuple(notes)
        self.remarks = dict(remarks or {})
        self.predictions = dict(predictions or dict.fromkeys(handed_in.questions))

    def points(self, name: str) -> int:
        """Return the points for one exercise."""
        checked = self.checked.get(name)
        entry = next((entry for entry in self.handed_in.exercises if entry.name == name), None)
        return entry.exercise.points if entry is not None and checked is not None and checked.passed else 0

    def points_predicted(self, name: str) -> int:
        """Return the points for a prediction: one for each that is made, one more if it is close."""
        value = self.predictions.get(name)
        return 0 if value is None else 1 + question(name).close(value)

    def is_judged(self, name: str) -> bool:
        """Return whether the machine let an exercise be judged; what has no answer counts as judged."""
        checked = self.checked.get(name)
        return checked is None or not checked.not_judged

    @property
    def is_whole(self) -> bool:
        """Whether all exercises were judged."""
        return all(map(self.is_judged, self.checked))

    @property
    def total(self) -> int:
        """The points for all exercises and predictions together."""
        return totals([self])[0]

    @property
    def most(self) -> int:
        """The highest possible number of points."""
        return totals([self])[1]

    @property
    def all_notes(self) -> list[str]:
        """The notes on the notebook, then the remarks on its exercises."""
        return [*self.notes, *(f"{name}: {remark}" for name, remark in self.remarks.items())]

    def to_json(self) -> dict[str, Any]:
        """Return the grade as JSON's types."""
        checked = {name: verdict_json(one) if one is not None else None for name, one in self.checked.items()}
        said = {"notes": list(self.notes), "remarks": self.remarks, "predictions": self.predictions}
        return {"checked": checked, **said}

    @classmethod
    def of_json(cls, handed_in: HandedIn, values: dict[str, Any]) -> Grade:
        """Return the grade of a notebook from what `to_json` returned for it.

        Raises:
            KeyError, TypeError, ValueError: The values were not made by `to_json`.
        """
        known = {entry.name: entry for entry in handed_in.exercises}
        checked = {
            str(name): checked_of(known[name], one) if one is not None else None
            for name, one in values["checked"].items()
        }
        remarks = {str(name): str(remark) for name, remark in values["remarks"].items()}
        predictions = {
            name: float(value) if (value := values["predictions"].get(name)) is not None else None
            for name in handed_in.questions
        }
        return cls(handed_in, checked, tuple(map(str, values["notes"])), remarks, predictions)


def totals(grades: Sequence[Grade]) -> tuple[int, int]:
    """Return the points and the highest possible number; of an exercise in several notebooks the best counts."""
    entries = {entry.name: entry for grade in grades for entry in grade.handed_in.exercises}
    questions = dict.fromkeys(name for grade in grades for name in grade.predictions)
    best = sum(max(grade.points(name) for grade in grades) for name in entries)
    best += sum(max(grade.points_predicted(name) for grade in grades) for name in questions)
    return best, sum(entry.exercise.points for entry in entries.values()) + POINTS * len(questions)


VERSION = 6


def key_of(each: HandedIn, guard: Guard) -> str:
    """Return a digest of all that a grade depends on: the notebook, the exercises' own files, the limits."""
    sources = [
        getsource(entry.module) + entry.text_path.read_text(encoding="utf-8") for entry in each.exercises
    ]
    names = [entry.name for entry in each.exercises]
    told = [VERSION, each.name, each.digest, names, sources, each.questions, dict(each.predicted)]
    return hashlib.sha256(json.dumps([*told, asdict(replace(guard, hidden=()))]).encode()).hexdigest()


class GradeStore:
    """The grades so far, in a file beside the table with one line per notebook: a stopped grading goes on from it.

    Args:
        path: the path of the file; None: no grades are kept.
        anew: whether to ignore the grades that are in it.
    """

    def __init__(self, path: Path | None, *, anew: bool = False) -> None:
        self._path = path
        self._lines: dict[str, dict[str, Any]] = {}
        if path is None or anew or not path.is_file():
            return
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
            try:  # if a line was cut short or changed, its notebook is graded again
                entry = json.loads(line)
                self._lines[str(entry["key"])] = dict(entry["grade"])
            except (ValueError, TypeError, KeyError, RecursionError):
                continue

    def get(self, key: str, handed_in: HandedIn) -> Grade | None:
        """Return the grade of that key, if there is one."""
        try:
            return Grade.of_json(handed_in, self._lines[key]) if key in self._lines else None
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def begin(self, kept: Mapping[str, Grade]) -> None:
        """Replace the file by one with these grades only."""
        if self._path is None:
            return
        partial = self._path.with_name(self._path.name + ".partial")
        whole = [_line(key, grade) for key, grade in kept.items() if grade.is_whole]
        partial.write_text("".join(whole), encoding="utf-8")
        partial.replace(self._path)

    def add(self, key: str, grade: Grade) -> None:
        """Append one grade to the file; one that is not whole is no grade, and its notebook is graded again."""
        if self._path is not None and grade.is_whole:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(key, grade))


def _line(key: str, grade: Grade) -> str:
    return json.dumps({"key": key, "notebook": grade.handed_in.name, "grade": grade.to_json()}) + "\n"
