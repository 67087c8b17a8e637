"""The grade of a notebook, and the grades so far in a file, so that a stopped grading can continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import getsource
from pathlib import Path
from typing import Any

from mpkit.common.disk import write_whole
from mpkit.course.grading.submissions import HandedIn
from mpkit.course.sandbox.guard import Guard
from mpkit.course.verdict import Checked, checked_of, verdict_json


@dataclass(frozen=True)
class Grade:
    """The grade of one notebook.

    Attributes:
        handed_in: the notebook.
        checked: the verdict on each exercise; None if there was none.
        notes: what went wrong with the notebook as a whole, or with its cells.
        remarks: by exercise, why there was no verdict.
    """

    handed_in: HandedIn
    checked: Mapping[str, Checked | None]
    notes: Sequence[str] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)

    def points(self, name: str) -> int:
        """Return the points for one exercise."""
        checked = self.checked.get(name)
        entry = next((entry for entry in self.handed_in.exercises if entry.name == name), None)
        return entry.exercise.points if entry is not None and checked is not None and checked.passed else 0

    def is_judged(self, name: str) -> bool:
        """Return whether the machine let an exercise be judged; what has no answer counts as judged."""
        checked = self.checked.get(name)
        return checked is None or not checked.not_judged

    @property
    def is_whole(self) -> bool:
        """Whether all exercises were judged."""
        return all(map(self.is_judged, self.checked))

    @property
    def all_notes(self) -> list[str]:
        """The notes on the notebook, then the remarks on its exercises."""
        return [*self.notes, *(f"{name}: {remark}" for name, remark in self.remarks.items())]

    def to_json(self) -> dict[str, Any]:
        """Return the grade as JSON's types."""
        checked = {name: verdict_json(one) if one is not None else None for name, one in self.checked.items()}
        return {"checked": checked, "notes": list(self.notes), "remarks": self.remarks}

    @classmethod
    def of_json(cls, handed_in: HandedIn, values: dict[str, Any]) -> Grade:
        """Return the grade of a notebook from what `to_json` returned for it."""
        known = {entry.name: entry for entry in handed_in.exercises}
        checked = {
            name: checked_of(known[name], one) if one is not None else None
            for name, one in values["checked"].items()
        }
        return cls(handed_in, checked, values["notes"], values["remarks"])


def totals(grades: Sequence[Grade]) -> tuple[int, int]:
    """Return the points and the highest possible number; of an exercise in several notebooks the best counts."""
    entries = {entry.name: entry for grade in grades for entry in grade.handed_in.exercises}
    best = sum(max(grade.points(name) for grade in grades) for name in entries)
    return best, sum(entry.exercise.points for entry in entries.values())


VERSION = 7


def key_of(each: HandedIn, guard: Guard) -> str:
    """Return a digest of all that a grade depends on: the notebook, the exercises' own files, the limits."""
    sources = [
        getsource(entry.module) + entry.text_path.read_text(encoding="utf-8") for entry in each.exercises
    ]
    names = [entry.name for entry in each.exercises]
    told = [VERSION, each.name, each.digest, names, sources, asdict(replace(guard, hidden=()))]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


class GradeStore:
    """The grades so far, in a file beside the table: a stopped grading goes on from it.

    Args:
        path: the path of the file.

    Raises:
        ValueError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._grades: dict[str, Any] = {}
        try:
            if path.is_file():
                self._grades = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path} has the grades so far, and cannot be read ({error}): remove it to grade all notebooks again"
            ) from None

    def get(self, key: str, handed_in: HandedIn) -> Grade | None:
        """Return the grade of that key, if there is one."""
        return Grade.of_json(handed_in, self._grades[key]) if key in self._grades else None

    def add(self, key: str, grade: Grade) -> None:
        """Keep a grade; one that is not whole is no grade, and its notebook is graded again."""
        if grade.is_whole:
            self._grades[key] = grade.to_json()
            write_whole(self._path, json.dumps(self._grades).encode())
