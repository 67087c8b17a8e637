"""Finding each student's notebooks, and the exercises that they should answer. All are read before the first one runs.

    FOLDER/ada.ipynb                    ada's
    FOLDER/ada/2-data-parallel.ipynb    ada's
    FOLDER/ada/ps1/4-pipelines.ipynb    ada's, as nbgrader has it in `submitted/`

If a notebook has an exercise of a family, it should answer all exercises of that family: a student who deletes a cell
gets no points for it.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mpkit.classroom.catalogue import Entry, find, of_family
from mpkit.classroom.grading.reading import NoNotebook, checks_in, code_cells, read_file
from mpkit.support.visible import visible

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
    """

    student: str
    name: str
    exercises: tuple[Entry, ...]
    cells: tuple[str, ...] = ()
    data: bytes = b""
    broken: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of the notebook."""
        return hashlib.sha256(self.data or self.broken.encode("utf-8", "replace")).hexdigest()


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
    known = next((each.exercises for each in submissions if each.exercises), ())
    # A notebook that cannot be read, or has no check left, should have answered the same exercises as the others.
    return [each if each.exercises else replace(each, exercises=known) for each in submissions]


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


def _read(folder: Path, path: Path, student: str, asked: tuple[Entry, ...]) -> HandedIn:
    name = visible(str(path.relative_to(folder))).replace("\n", "\\n")
    data = b""
    try:
        data = read_file(path)
        cells = code_cells(data)
    except NoNotebook as error:
        why = visible(str(error)).strip().partition("\n")[0][:200]
        return HandedIn(student, name, asked, data=data, broken=f"it cannot be read as a notebook: {why}")
    checked = [each for source in cells for each, _ in checks_in(source)]
    return HandedIn(student, name, asked or _of(checked), tuple(cells), data)


def _of(names: list[str]) -> tuple[Entry, ...]:
    """Return all exercises of the families to which the named ones belong."""
    entries: dict[str, Entry] = {}
    for name in names:
        try:
            family = find(name).family
        except ValueError:  # no exercise of ours
            continue
        entries |= {entry.name: entry for entry in of_family(family)}
    return tuple(entries.values())
