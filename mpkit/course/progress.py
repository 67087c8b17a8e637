"""A student's progress: one file in the course's folder, and nowhere else; and all exercises with it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpkit.common.disk import write_whole
from mpkit.common.safe_text import escape
from mpkit.common.size_limits import read_json, read_text
from mpkit.course.catalogue import ExerciseEntry

FILE = "mpkit-progress.json"


@dataclass(frozen=True)
class ExerciseProgress:
    """A student's progress in one exercise.

    Attributes:
        tries: how many different answers were checked; the stub, and programs that raise an error, are no answers.
        failures: how many different answers in a row were wrong since it was last solved.
        passed: whether it was ever solved.
        wrong: the fingerprints of these wrong answers, in their order.
    """

    tries: int = 0
    failures: int = 0
    passed: bool = False
    wrong: Sequence[str] = field(default_factory=list)

    def earlier(self, answer: str) -> int:
        """Return how many other wrong answers came before this one; a second check of it counts for nothing.

        >>> ExerciseProgress(2, 2, wrong=["a", "b"]).earlier("a"), ExerciseProgress(2, 2, wrong=["a", "b"]).earlier("c")
        (0, 2)
        """
        return self.wrong.index(answer) if answer in self.wrong else self.failures


@dataclass(frozen=True)
class Progress:
    """A student's progress in all exercises.

    Attributes:
        path: the path of the file.
        done: the progress in each exercise, by name.
        predictions: the number that was locked in for each question, by name.
    """

    path: Path
    done: Mapping[str, ExerciseProgress]
    predictions: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path | None = None) -> Progress:
        """Read the progress file of a folder; None: of the current one, which is the notebook's.

        Raises:
            ValueError: The file cannot be read.
        """
        path = (folder if folder is not None else Path.cwd()) / FILE
        if not path.is_file():
            return cls(path, {})
        try:
            told = read_json(read_text(path))
            predictions = {name: float(one["value"]) for name, one in told.get("predictions", {}).items()}
            return cls(
                path, {name: ExerciseProgress(**one) for name, one in told["exercises"].items()}, predictions
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} has your progress, and cannot be read ({error}): move or remove it"
            ) from None

    def add_check(self, name: str, passed: bool, answer: str = "", *, counts: bool = True) -> Progress:
        """Return the progress after one more check of an exercise.

        Args:
            name: the exercise's name.
            passed: whether the answer is right.
            answer: its fingerprint; a wrong answer that was checked before changes nothing. "": it is a new one.
            counts: whether it is an answer at all, and not the stub or a program that raises an error.
        """
        before = self.done.get(name, ExerciseProgress())
        if not passed and (not counts or (answer and answer in before.wrong)):
            return replace(self, done={**self.done, name: before})
        wrong = [] if passed else [*before.wrong, *([answer] if answer else [])]
        failures = 0 if passed else before.failures + 1
        tries, ever = before.tries + 1, before.passed or passed
        now = ExerciseProgress(tries, failures, ever, wrong)
        return replace(self, done={**self.done, name: now})

    def add_prediction(self, name: str, value: float) -> Progress:
        """Return the progress with a prediction."""
        return replace(self, predictions={**self.predictions, name: value})

    def write(self) -> None:
        """Write the file atomically; warn if it cannot be written."""
        told = {
            "exercises": {name: vars(one) for name, one in sorted(self.done.items())},
            "predictions": {name: {"value": value} for name, value in sorted(self.predictions.items())},
        }
        try:
            write_whole(self.path, json.dumps(told, indent=1).encode())
        except OSError as error:
            warnings.warn(
                f"your progress is not kept, since {self.path} cannot be written: {error}", stacklevel=3
            )


@dataclass(frozen=True, repr=False)
class Overview:
    """All exercises, printed and shown as a list.

    Attributes:
        families: the title and the exercises of each family.
        done: the student's progress, by exercise.
    """

    families: Sequence[tuple[str, Sequence[ExerciseEntry]]]
    done: Mapping[str, ExerciseProgress]

    def __str__(self) -> str:
        return "\n\n".join(
            "\n".join([self._head(title, entries), *(f"  {self._mark(e)} {e.name}" for e in entries)])
            for title, entries in self.families
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = []
        for title, entries in self.families:
            names = "".join(
                f"<li>{self._mark(e)} <code>{e.name}</code> {escape(e.text.title)}</li>" for e in entries
            )
            parts.append(
                f"<details open><summary><b>{escape(self._head(title, entries))}</b></summary>"
                f'<ul style="list-style:none;padding-left:1em;margin:4px 0 12px">{names}</ul></details>'
            )
        return "".join(parts)

    def _head(self, title: str, entries: Sequence[ExerciseEntry]) -> str:
        solved = sum(self._progress_of(entry).passed for entry in entries)
        return f"{title}: {solved} of {len(entries)}"

    def _mark(self, entry: ExerciseEntry) -> str:
        one = self._progress_of(entry)
        return "✔" if one.passed else "✗" if one.tries else "·"

    def _progress_of(self, entry: ExerciseEntry) -> Any:
        return self.done.get(entry.name, ExerciseProgress())
