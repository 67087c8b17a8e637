"""Whose notebooks are where, and which exercises they should answer.

    FOLDER/ada.ipynb                    ada's
    FOLDER/ada/2-data-parallel.ipynb    ada's
    FOLDER/ada/ps1/4-pipelines.ipynb    ada's, as nbgrader has it in `submitted/`

A notebook should answer all exercises of the families that it has one of: who deletes a cell gets no points for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mpkit.classroom.catalogue import Entry, find, of_family
from mpkit.classroom.grading.collect import checks_in, code_cells

__all__ = ["HandedIn", "handed_in"]


@dataclass(frozen=True)
class HandedIn:
    """One notebook.

    Attributes:
        student: by the folder's name, or the file's.
        path: of the notebook.
        exercises: that it should answer.
        broken: why it cannot be read; "" if it can.
    """

    student: str
    path: Path
    exercises: tuple[Entry, ...]
    broken: str = ""


def handed_in(folder: Path, exercises: tuple[str, ...] = ()) -> list[HandedIn]:
    """All notebooks below a folder, by student.

    Args:
        exercises: that each should answer; none: those of the families in it.

    Raises:
        ValueError: there is no such folder, no notebook in it, or no such exercise.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder; grade takes one with a notebook, or a folder of them, a student"
        )
    paths = sorted(
        path for path in folder.rglob("*.ipynb")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )  # fmt: skip
    if not paths:
        raise ValueError(
            f"there is no notebook in {folder}: expected STUDENT.ipynb or STUDENT/NOTEBOOK.ipynb"
        )
    asked = tuple(find(name) for name in exercises)
    found = [_read(folder, path, asked) for path in paths]
    known = next((each.exercises for each in found if each.exercises), ())
    # What cannot be read, or has no check left, should have answered what the others do.
    return [
        each if each.exercises else HandedIn(each.student, each.path, known, each.broken) for each in found
    ]


def _read(folder: Path, path: Path, asked: tuple[Entry, ...]) -> HandedIn:
    first = path.relative_to(folder).parts[0]
    student = first.removesuffix(".ipynb")
    try:
        names = [name for source in code_cells(path) for name, _ in checks_in(source)]
    except (OSError, ValueError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        said = str(error).strip().partition("\n")[0][:200]
        return HandedIn(
            student, path, asked, f"it cannot be read as a notebook: {said or type(error).__name__}"
        )
    return HandedIn(student, path, asked or _of(names))


def _of(names: list[str]) -> tuple[Entry, ...]:
    """All exercises of the families of these."""
    found: dict[str, Entry] = {}
    for name in names:
        try:
            family = find(name).family
        except ValueError:  # no exercise of ours
            continue
        found |= {entry.name: entry for entry in of_family(family)}
    return tuple(found.values())
