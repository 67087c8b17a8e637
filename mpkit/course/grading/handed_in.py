"""Finding each student's notebooks, and the exercises that they should answer. All are read before the first one runs.

    FOLDER/ada.ipynb                    ada's
    FOLDER/ada/2-data-parallel.ipynb    ada's
    FOLDER/ada/ps1/4-pipelines.ipynb    ada's, as nbgrader has it in `submitted/`

If a notebook has an exercise of a family, it should answer all exercises of that family: a student who deletes a cell
gets no points for it.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from mpkit.common.safe_text import visible
from mpkit.common.size_limits import read_json
from mpkit.course.catalogue import ExerciseEntry, find, of_family
from mpkit.course.framework.variants import Variant, plainly
from mpkit.course.grading.notebook_record import (
    predictions_kept,
    predictions_shown,
    questions_in,
    read_justifications,
    tries_shown,
    variant_of,
)
from mpkit.course.grading.reading import NoNotebook, checks_in, code_cells, read_file
from mpkit.course.no_solutions import MISSING
from mpkit.course.progress import FILE

__all__ = ["HandedIn", "handed_in"]


@dataclass(frozen=True)
class HandedIn:
    """One submitted notebook.

    Attributes:
        student: the student's name, which is the name of the folder or the file.
        name: the notebook's path below the class's folder, such as "ada/ps1/4-pipelines.ipynb".
        exercises: the exercises that it should answer.
        cells: the sources of its code cells.
        data: the whole file.
        broken: the reason why it cannot be read; "" if it can.
        at: when it was handed in: the time in nbgrader's `timestamp.txt` beside it, or that of the file.
        tries: how often each exercise was checked, as its outputs say, or the file of progress beside it.
        questions: the names of the predictions that it asks for.
        predicted: the predictions that were locked in, as its file of progress says, or else its outputs.
        written: the justifications in it: the exercise that each is about, and its text.
        odd: what is odd about whose numbers it has.
    """

    student: str
    name: str
    exercises: tuple[ExerciseEntry, ...]
    cells: tuple[str, ...] = ()
    data: bytes = b""
    broken: str = ""
    at: datetime | None = None
    tries: Mapping[str, int] = field(default_factory=dict)
    questions: tuple[str, ...] = ()
    predicted: Mapping[str, float] = field(default_factory=dict)
    written: tuple[tuple[str, str], ...] = ()
    odd: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what a grading process needs as JSON's types; the rest is not needed there."""
        named = {"student": self.student, "name": self.name, "cells": self.cells, "broken": self.broken}
        names = [(entry.name, entry.variant) for entry in self.exercises]
        asked = {"questions": self.questions, "predicted": dict(self.predicted), "odd": self.odd}
        return named | asked | {"exercises": names, "data": base64.b64encode(self.data).decode()}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """Return the notebook of which `to_json` returned the values."""
        entries, data = tuple(find(*one) for one in values["exercises"]), base64.b64decode(values["data"])
        return cls(
            values["student"], values["name"], entries, tuple(values["cells"]), data, values["broken"],
            questions=tuple(values["questions"]), predicted=values["predicted"],
            odd=tuple(values["odd"]),
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """SHA-256 of the notebook."""
        return hashlib.sha256(self.data or self.broken.encode("utf-8", "replace")).hexdigest()


def handed_in(folder: Path, exercises: tuple[str, ...] = (), course: str = "") -> list[HandedIn]:
    """Return all notebooks below a folder, by student.

    Args:
        folder: the folder.
        exercises: the exercises that each should answer; none: those of the families in it.
        course: the course whose students have numbers of their own; "": as each notebook says.

    Raises:
        ValueError: There is no such folder, no notebook in it, no such exercise, or no solutions to grade with.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder; grade takes one with a notebook, or a folder of them, a student"
        )
    paths = sorted(_notebooks(folder))
    if not paths:
        raise ValueError(
            f"there is no notebook in {folder}: expected STUDENT.ipynb or STUDENT/NOTEBOOK.ipynb"
        )
    asked = tuple(find(name) for name in exercises)
    students = _students([path.relative_to(folder).parts[0] for path in paths])
    submissions = [_read(folder, path, students[path.relative_to(folder).parts[0]], asked) for path in paths]
    if any(entry.is_sealed for each in submissions for entry in each.exercises):
        raise ValueError(MISSING)
    asked_of = [_with_exercises(each, submissions) for each in submissions]
    return [_with_numbers(_with_questions(each, asked_of), course) for each in asked_of]


def _with_exercises(each: HandedIn, submissions: Sequence[HandedIn]) -> HandedIn:
    """Return a notebook that cannot be read, or has no check left, with the exercises of most others of its name."""
    if each.exercises:
        return each
    others = [other for other in submissions if other.exercises]
    same_name = [other for other in others if Path(other.name).name == Path(each.name).name]
    most = Counter(other.exercises for other in same_name or others).most_common(1)
    return replace(each, exercises=most[0][0] if most else ())


def _with_questions(each: HandedIn, submissions: Sequence[HandedIn]) -> HandedIn:
    """Return a notebook with the questions that at least half of the readable ones with its exercises ask.

    So a notebook that is broken, or lacks the cell of a question, has as many possible points as the others.
    """
    others = [
        other.questions for other in submissions if other.exercises == each.exercises and not other.broken
    ]
    counts = Counter(name for questions in others for name in questions)
    return replace(each, questions=tuple(name for name, many in counts.items() if 2 * many >= len(others)))


def _with_numbers(each: HandedIn, course: str) -> HandedIn:
    """Return a notebook with exercises that have its student's numbers: the course's, else those that it names."""
    if not any(entry.varies for entry in each.exercises):
        return each
    said = variant_of(each.data)
    own = str(Variant.for_student(course, each.student)) if course else said
    exercises = tuple(replace(entry, variant=own) for entry in each.exercises)
    return replace(each, exercises=exercises, odd=_odd(each.student, said, own))


def _odd(student: str, said: str, own: str) -> tuple[str, ...]:
    """Return what is odd about the variant that a notebook names, where it should be the student's own."""
    if not own:
        return ()
    judged = f"; it is judged with the numbers of {Variant.read(own).student!r}"
    if not said:
        return (f"the notebook does not say whose numbers it has{judged}",)
    theirs = Variant.read(said)
    if plainly(theirs.student) != plainly(student):
        return (f"the notebook has the numbers of {theirs.student!r}{judged}",)
    if theirs.key != Variant.read(own).key:
        return (f"the notebook has numbers of another course{judged}",)
    return ()


def _notebooks(folder: Path) -> Iterator[Path]:
    """Yield all notebooks except those in hidden folders (Jupyter's own copies); do not follow links to folders."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in (
            *files,
            *folders,
        ):  # report a folder with such a name too: somebody meant to hand it in
            if name.endswith(".ipynb") and not name.startswith("."):
                yield Path(place, name)
        folders[:] = [name for name in folders if not name.endswith(".ipynb")]


def _students(firsts: list[str]) -> dict[str, str]:
    """Return the student of each file or folder: "kim.ipynb" is kim's, unless there is a folder "kim" too."""
    names = {first: first.removesuffix(".ipynb") for first in firsts}
    many = Counter(names.values())
    return {
        first: visible(first if many[name] > 1 else name).replace("\n", "\\n")
        for first, name in names.items()
    }


def _read(folder: Path, path: Path, student: str, asked: tuple[ExerciseEntry, ...]) -> HandedIn:
    name = visible(str(path.relative_to(folder))).replace("\n", "\\n")
    data = b""
    try:
        data = read_file(path)
        cells = code_cells(data)
    except NoNotebook as error:
        why = visible(str(error)).strip().partition("\n")[0][:200]
        broken = f"it cannot be read as a notebook: {why}"
        return HandedIn(student, name, asked, data=data, broken=broken, at=_time(path))
    checked = [each for source in cells for each, _ in checks_in(source)]
    progress = _progress(path)
    return HandedIn(
        student, name, asked or _exercises_of(checked), tuple(cells), data, at=_time(path),
        tries=_tries(progress, data),
        questions=questions_in(cells), predicted=predictions_shown(data) | predictions_kept(progress),
        written=tuple(read_justifications(data)),
    )  # fmt: skip


def _time(path: Path) -> datetime | None:
    """Return when a notebook was handed in; None if nothing says so."""
    with suppress(NoNotebook, ValueError):
        text = read_file(path.with_name("timestamp.txt")).decode("utf-8", "replace").strip()
        said = datetime.fromisoformat(
            text.removesuffix(" UTC")
        )  # nbgrader writes "2026-11-20 10:01:39.123 UTC"
        return said if said.tzinfo is not None else said.replace(tzinfo=UTC)
    with suppress(OSError):
        return datetime.fromtimestamp(path.lstat().st_mtime, UTC)
    return None


def _progress(path: Path) -> Any:
    """Return the student's file of progress beside a notebook; None if there is none that can be read."""
    with suppress(NoNotebook, ValueError):
        return read_json(read_file(path.with_name(FILE)).decode())
    return None


def _tries(progress: Any, data: bytes) -> dict[str, int]:
    """Return how often each exercise was checked, as far as it is known."""
    found = tries_shown(data)
    with suppress(TypeError, KeyError, AttributeError):
        for name, one in progress["exercises"].items():
            if type(one["tries"]) is int:
                found[name] = max(found.get(name, 0), one["tries"])
    return found


def _exercises_of(names: list[str]) -> tuple[ExerciseEntry, ...]:
    """Return all exercises of the families to which the named ones belong."""
    entries: dict[str, ExerciseEntry] = {}
    for name in names:
        try:
            family = find(name).family
        except ValueError:  # no exercise of ours
            continue
        entries |= {entry.name: entry for entry in of_family(family)}
    return tuple(entries.values())
