"""Grades as Gradescope's `results.json`.

In an autograder's container, where `/autograder/submission` has the notebooks of one student:

    mpkit grade /autograder/submission --gradescope /autograder/results/results.json

For a class that is graded elsewhere, a folder gets a file per student. The format is that of Gradescope's documentation
("Autograder specifications", results.json): a list of tests, each with its score, status and output; the total is
their sum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpkit.common.disk import write_whole
from mpkit.common.safe_text import visible
from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.grading.grade_file import Grade
from mpkit.course.grading.report import page_names
from mpkit.course.predictions.questions import POINTS

__all__ = ["results", "write_gradescope"]


def write_gradescope(path: Path, grades: Sequence[Grade]) -> list[Path]:
    """Write the grades, and return what was written.

    Args:
        path: a file that ends in .json takes all grades as those of one student; a folder gets a file per student.
        grades: the grades of the notebooks.

    Raises:
        ValueError: The path is a file of another kind.
    """
    if path.suffix == ".json" and not path.is_dir():
        return [_write_results(path, grades)]
    if path.exists() and not path.is_dir():
        raise ValueError(f"--gradescope {path}: a folder is asked for, or a file that ends in .json")
    path.mkdir(parents=True, exist_ok=True)
    theirs: dict[str, list[Grade]] = {}
    for grade in grades:
        theirs.setdefault(grade.handed_in.student, []).append(grade)
    names = page_names(list(theirs))
    return [_write_results(path / names[name].replace(".html", ".json"), theirs[name]) for name in theirs]


def results(grades: Sequence[Grade]) -> dict[str, Any]:
    """Return one student's grades as Gradescope reads them; of an exercise in several notebooks the best counts."""
    entries = {entry.name: entry for grade in grades for entry in grade.handed_in.exercises}
    tests = [_exercise(entry, grades) for entry in entries.values()]
    asked = dict.fromkeys(name for grade in grades for name in grade.predictions)
    tests += [
        _test(f"prediction: {name}", max(grade.points_predicted(name) for grade in grades), POINTS, "")
        for name in asked
    ]
    notes = [visible(note) for grade in grades for note in grade.notes]
    return {
        "output": "\n".join(notes),
        "output_format": "text",
        "stdout_visibility": "hidden",
        "tests": tests,
    }


def _exercise(entry: ExerciseEntry, grades: Sequence[Grade]) -> Mapping[str, Any]:
    best = max(
        grades, key=lambda grade: (grade.points(entry.name), grade.checked.get(entry.name) is not None)
    )
    checked = best.checked.get(entry.name)
    if checked is None:
        said = best.remarks.get(entry.name) or "no answer was found"
    else:
        said = str(replace(checked, tries=1))
    made = _test(entry.text.title, best.points(entry.name), entry.exercise.points, visible(said))
    if best.is_judged(entry.name):
        return made
    return {key: value for key, value in made.items() if key not in ("score", "status")}  # no zero


def _test(name: str, score: int, most: int, output: str) -> Mapping[str, Any]:
    status = "passed" if score == most else "failed"
    return {
        "name": name, "score": score, "max_score": most, "status": status,
        "output": output, "output_format": "text", "visibility": "visible",
    }  # fmt: skip


def _write_results(path: Path, grades: Sequence[Grade]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(results(grades), indent=1).encode())
    return path
