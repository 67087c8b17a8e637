"""Finding each student's notebooks, and the exercises that they should answer. All are read before the first one runs.

    FOLDER/ada.ipynb                    ada's
    FOLDER/ada/2-data-parallel.ipynb    ada's, too
    FOLDER/ada/ps1/4-pipelines.ipynb    ada's, as nbgrader has it in `submitted/`

If a notebook has an exercise of a family, it should answer all exercises of that family: a student who deletes a cell
gets no points for it.

Nothing in a notebook can stop the grader. It may be a pipe, be endless, be no JSON, be JSON nested a hundred thousand
levels deep, or have code that cannot be parsed: whatever it is, it affects its own grade only.
"""

import ast
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpkit.common.safe_text import visible
from mpkit.common.size_limits import read_json
from mpkit.course.catalogue import ExerciseEntry, find, of_family

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
    """

    student: str
    name: str
    exercises: tuple[ExerciseEntry, ...]
    cells: tuple[str, ...] = ()
    data: bytes = b""
    broken: str = ""

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
    submissions = [_read(path.relative_to(folder), path, asked) for path in paths]
    return [_with_exercises(each, submissions) for each in submissions]


def _notebooks(folder: Path) -> Iterator[Path]:
    """Yield all notebooks except those in hidden folders (Jupyter's own copies); do not follow links to folders."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # A folder with such a name is reported too: somebody meant to hand it in.
        for name in (*files, *folders):
            if name.endswith(".ipynb") and not name.startswith("."):
                yield Path(place, name)
        folders[:] = [name for name in folders if not name.endswith(".ipynb")]


def _with_exercises(each: HandedIn, submissions: Sequence[HandedIn]) -> HandedIn:
    """Return a notebook that cannot be read, or has no check left, with the exercises of most others of its name."""
    if each.exercises:
        return each
    others = [other for other in submissions if other.exercises]
    same_name = [other for other in others if Path(other.name).name == Path(each.name).name]
    most = Counter(other.exercises for other in same_name or others).most_common(1)
    return replace(each, exercises=most[0][0] if most else ())


def _read(below: Path, path: Path, asked: tuple[ExerciseEntry, ...]) -> HandedIn:
    student = visible(below.parts[0].removesuffix(".ipynb")).replace("\n", "\\n")
    name = visible(str(below)).replace("\n", "\\n")
    data = b""
    try:
        data = read_file(path)
        cells = code_cells(data)
    except NoNotebook as error:
        why = visible(str(error)).strip().partition("\n")[0][:200]
        return HandedIn(student, name, asked, data=data, broken=f"it cannot be read as a notebook: {why}")
    checked = [each for source in cells for each, _ in checks_in(source)]
    return HandedIn(student, name, asked or _exercises_of(checked), tuple(cells), data)


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


def code_cells(data: bytes) -> list[str]:
    """Return the sources of a notebook's code cells.

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
    sources = []
    for cell in cells:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            lines: list[Any] = source if isinstance(source, list) else [source]
            if not all(isinstance(line, str) for line in lines):
                raise NoNotebook("it has a cell whose source is no text")
            sources.append("".join(lines))
    return sources


def checks_in(source: str) -> Iterator[tuple[str, ast.expr]]:
    r"""Yield the exercises that a cell checks, each with the expression of its answer.

    >>> [(name, ast.unparse(node)) for name, node in checks_in('mk.check("gpipe", gpipe)\nprint("check")')]
    [('gpipe', 'gpipe')]
    """
    if len(source) > LONGEST_CELL or "check" not in source:
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or len(call.args) < 2:
            continue
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        name = call.args[0]
        if called == "check" and isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value, call.args[1]
