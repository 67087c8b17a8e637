"""Finding each student's notebooks, and the exercises that they should answer. All are read before the first one runs.

    FOLDER/ada.ipynb                    ada's
    FOLDER/ada/2-data-parallel.ipynb    ada's
    FOLDER/ada/ps1/4-pipelines.ipynb    ada's, as nbgrader has it in `submitted/`

If a notebook has an exercise of a family, it should answer all exercises of that family: a student who deletes a cell
gets no points for it.

Nothing in a notebook can stop the grader. It may be a pipe, be endless, be no JSON, be JSON nested a hundred thousand
levels deep, or have code that cannot be parsed: whatever it is, it affects its own grade only.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeGuard

from mpkit.common.safe_text import visible
from mpkit.common.size_limits import read_json
from mpkit.course.catalogue import ExerciseEntry, find, of_family
from mpkit.course.predictions.predict import PREDICTED
from mpkit.course.predictions.questions import QUESTIONS
from mpkit.course.progress import FILE
from mpkit.course.verdict import CHECKED

__all__ = [
    "HandedIn", "NoNotebook", "checks_in", "code_cells", "handed_in", "predictions_kept", "predictions_shown",
    "read_file",
]  # fmt: skip

LARGEST = 64 * 2**20
"""The most bytes of a notebook; those with many pictures have some ten million."""

LONGEST_CELL = 1_000_000
"""The most characters of a cell that is searched for checks."""


class NoNotebook(Exception):
    """A file cannot be read as a notebook; the message says why."""


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

    def to_json(self) -> dict[str, Any]:
        """Return what a grading process needs as JSON's types; the rest is not needed there."""
        return {
            "student": self.student,
            "name": self.name,
            "exercises": [entry.name for entry in self.exercises],
            "cells": self.cells,
            "data": base64.b64encode(self.data).decode(),
            "broken": self.broken,
            "questions": self.questions,
            "predicted": dict(self.predicted),
        }

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Self:
        """Return the notebook of which `to_json` returned the values."""
        return cls(
            values["student"], values["name"], tuple(map(find, values["exercises"])), tuple(values["cells"]),
            base64.b64decode(values["data"]), values["broken"], questions=tuple(values["questions"]),
            predicted=values["predicted"],
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """SHA-256 of the notebook."""
        return hashlib.sha256(self.data or self.broken.encode("utf-8", "replace")).hexdigest()


# ---- which notebooks there are, and what each should answer


def handed_in(folder: Path, exercises: tuple[str, ...] = ()) -> list[HandedIn]:
    """Return all notebooks below a folder, by student.

    Args:
        folder: the folder.
        exercises: the exercises that each should answer; none: those of the families in it.

    Raises:
        ValueError: There is no such folder, no notebook in it, or no such exercise.
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
    submissions = [_with_exercises(each, submissions) for each in submissions]
    return [_with_questions(each, submissions) for each in submissions]


def _notebooks(folder: Path) -> Iterator[Path]:
    """Yield all notebooks except those in hidden folders (Jupyter's own copies); do not follow links to folders."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # A folder with such a name is reported too: somebody meant to hand it in.
        for name in (*files, *folders):
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
        tries=_tries(progress, data), questions=_questions_in(cells),
        predicted=predictions_shown(data) | predictions_kept(progress),
    )  # fmt: skip


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


def _time(path: Path) -> datetime | None:
    """Return when a notebook was handed in; None if nothing says so."""
    with suppress(NoNotebook, ValueError):
        text = read_file(path.with_name("timestamp.txt")).decode("utf-8", "replace").strip()
        said = datetime.fromisoformat(text.removesuffix(" UTC"))  # nbgrader: "2026-11-20 10:01:39.123 UTC"
        return said if said.tzinfo is not None else said.replace(tzinfo=UTC)
    with suppress(OSError):
        return datetime.fromtimestamp(path.lstat().st_mtime, UTC)
    return None


# ---- files and cells


def read_file(path: Path) -> bytes:
    """Return the bytes of a notebook's file.

    Raises:
        NoNotebook: The path is not a regular file, is a link, is too large, or may not be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        what = "a link: hand in the file itself" if path.is_symlink() else error.strerror or str(error)
        raise NoNotebook(what) from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
        os.close(handle)
        large = f"it has {status.st_size:,} bytes, of which {LARGEST:,} are read at most"
        raise NoNotebook(large if stat.S_ISREG(status.st_mode) else "it is no file")
    with os.fdopen(handle, "rb") as file:
        try:
            return file.read(LARGEST)
        except OSError as error:
            raise NoNotebook(error.strerror or str(error)) from None


def _cells(data: bytes) -> list[dict[str, Any]]:
    """Return the cells of a notebook.

    Raises:
        NoNotebook: The data are not a notebook.
    """
    try:
        book = read_json(data.decode("utf-8-sig"))
    except ValueError as error:
        raise NoNotebook(f"{type(error).__name__}: {str(error)[:150]}") from None
    cells = book.get("cells") if isinstance(book, dict) else None
    if not isinstance(cells, list):
        raise NoNotebook("it has no list of cells")
    return _dicts(cells)


def code_cells(data: bytes) -> list[str]:
    """Return the sources of a notebook's code cells.

    Raises:
        NoNotebook: The data are not a notebook.
    """
    sources = []
    for cell in _cells(data):
        if cell.get("cell_type") == "code":
            source = cell.get("source", "")
            lines: list[Any] = source if isinstance(source, list) else [source]
            if not all(isinstance(line, str) for line in lines):
                raise NoNotebook("it has a cell whose source is no text")
            sources.append("".join(lines))
    return sources


def _dicts(values: Any) -> list[dict[str, Any]]:
    """Return the dicts of a list; none of anything else."""
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def checks_in(source: str) -> Iterator[tuple[str, ast.expr]]:
    r"""Yield the exercises that a cell checks, each with the expression of its answer.

    >>> [(name, ast.unparse(node)) for name, node in checks_in('mk.check("gpipe", gpipe)\nprint("check")')]
    [('gpipe', 'gpipe')]
    """
    for node in _calls_in(source, "check"):
        name = node.args[0]
        if len(node.args) > 1 and isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value, node.args[1]


def _calls_in(source: str, function: str) -> Iterator[ast.Call]:
    """Yield the calls of a function with at least one argument, as `function(...)` or `mk.function(...)`."""
    if len(source) > LONGEST_CELL or function not in source:
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == function:
                yield node


# ---- tries and predictions: what a notebook says of itself. None of it gives points for an exercise.


def _progress(path: Path) -> Any:
    """Return the student's file of progress beside a notebook; None if there is none that can be read."""
    with suppress(NoNotebook, ValueError):
        return read_json(read_file(path.with_name(FILE)).decode())
    return None


def _tries(progress: Any, data: bytes) -> dict[str, int]:
    """Return how often each exercise was checked, as the file of progress and the outputs of checks say."""
    found: dict[str, int] = {}
    for said in _outputs(data, CHECKED):
        if isinstance(said.get("name"), str) and type(said.get("tries")) is int:
            found[said["name"]] = max(found.get(said["name"], 0), said["tries"])
    with suppress(TypeError, KeyError, AttributeError):
        for name, one in progress["exercises"].items():
            if type(one["tries"]) is int:
                found[name] = max(found.get(name, 0), one["tries"])
    return found


def _questions_in(sources: list[str]) -> tuple[str, ...]:
    """Return the names of the questions that a notebook's cells ask with `mk.predict`."""
    known = {each.name for each in QUESTIONS}
    names = [
        call.args[0].value
        for source in sources
        for call in _calls_in(source, "predict")
        if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    ]
    return tuple(dict.fromkeys(name for name in names if name in known))


def predictions_shown(data: bytes) -> dict[str, float]:
    """Return the predictions that the notebook's outputs show as locked in, the first of each."""
    found: dict[str, float] = {}
    for said in _outputs(data, PREDICTED):
        if isinstance(said.get("name"), str) and _is_number(said.get("value")):
            found.setdefault(said["name"], float(said["value"]))
    return found


def predictions_kept(progress: Any) -> dict[str, float]:
    """Return the predictions in a file of progress, as it is read; none if it is anything else."""
    kept = progress.get("predictions") if isinstance(progress, dict) else None
    if not isinstance(kept, Mapping):
        return {}
    values = {name: one.get("value") for name, one in kept.items() if isinstance(one, dict)}
    return {str(name): float(value) for name, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _outputs(data: bytes, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of one type in the outputs of a notebook."""
    for cell in _cells(data):
        for output in _dicts(cell.get("outputs")):
            bundle = output.get("data")
            said = bundle.get(kind) if isinstance(bundle, dict) else None
            if isinstance(said, dict):
                yield said
