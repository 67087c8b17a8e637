"""Exercises by name: each is a module of a family's folder in `mpkit/course/exercises/`.

In an exam, students install an mpkit whose exercises have no solutions (`scripts/exam`). The distribution
mpkit-solutions has the same modules whole; where it is installed, they are used.

Where there is no torch, such as in a browser, the catalogue has the exercises that need none.

A family is a package. Its docstring is the beginning of the notebook: a title, then Markdown. The code after
`# %% given` is used by all of its exercises.
"""

from __future__ import annotations

import difflib
import pkgutil
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from inspect import getsource
from pathlib import Path
from types import ModuleType

from mpkit.common.missing_packages import lacks_torch
from mpkit.course.exercise_text import ExerciseText, read_text
from mpkit.course.framework.exercise import HOMES, Exercise
from mpkit.course.framework.source import ExerciseSource, given_in
from mpkit.course.framework.variants import Variant, varies, vary_module

__all__ = ["ExerciseEntry", "families", "find", "of_family", "solution_folders"]

OF_A_CHECKOUT = (".git", "build", "notebooks", "tests")
"""The folders of mpkit's repository that hold solutions as well."""


@dataclass(frozen=True)
class ExerciseEntry:
    """An exercise, by its name and its family.

    Attributes:
        name: the exercise's name, such as "ring-all-reduce".
        family: the family's name, such as "ranks".
        variant: whose numbers it has (`framework.variants`); "": those that are in its file.
    """

    name: str
    family: str
    variant: str = ""

    @property
    def module(self) -> str:
        """The name of the exercise's module."""
        return f"{_home().__name__}.{self.family}.{self.name.replace('-', '_')}"

    @cached_property
    def exercise(self) -> Exercise:
        """The exercise that its author wrote."""
        exercise = self._file[0].EXERCISE
        assert isinstance(exercise, Exercise)
        return self.text.complete(exercise)

    @cached_property
    def text(self) -> ExerciseText:
        """What the student reads, hints and wrong answers: the file beside the module that ends in ".md"."""
        return read_text(self.text_path, self._file[0], self.source.plain)

    @property
    def text_path(self) -> Path:
        """The path of the exercise's text file."""
        return Path(str(import_module(self.module).__file__)).with_suffix(".md")

    @property
    def given_code(self) -> str:
        """The code that a student has before the answer's cell: the family's, and the exercise's own."""
        package = import_module(self.module.rpartition(".")[0])
        return f"{given_in(getsource(package))}\n\n{self.source.given}\n"

    @cached_property
    def source(self) -> ExerciseSource:
        """The exercise's Python file, in its parts."""
        return ExerciseSource.from_code(self.module, self._file[1])

    @property
    def is_sealed(self) -> bool:
        """Whether the solution and all that tells it are missing here, as on a student's machine in an exam."""
        return bool(getattr(_home(), "SEALED", False))

    @property
    def varies(self) -> bool:
        """Whether the exercise's numbers differ from student to student."""
        return bool(varies(import_module(self.module)))

    @property
    def runs_here(self) -> bool:
        """Whether it can be checked in this Python: without torch there are no ranks."""
        if find_spec("torch") is not None:
            return True
        try:
            return not self.exercise.needs_ranks
        except ModuleNotFoundError as error:
            if lacks_torch(error):
                return False
            raise

    @property
    def _file(self) -> tuple[ModuleType, str]:
        return vary_module(self.module, self.variant)


def families() -> list[ModuleType]:
    """Return the packages of the families that have exercises here, in the order of the course."""
    names = {entry.family for entry in _entries() if entry.runs_here}
    packages = [import_module(f"{_home().__name__}.{name}") for name in names]
    return sorted(packages, key=lambda package: package.PLACE)


def of_family(family: str, variant: str = "") -> list[ExerciseEntry]:
    """Return the exercises of a family, in their order; `variant` says whose numbers they have."""
    entries = [
        replace(entry, variant=variant) for entry in _entries() if entry.family == family and entry.runs_here
    ]
    return sorted(entries, key=lambda entry: (entry.exercise.place, entry.name))


def find(name: str, variant: str = "") -> ExerciseEntry:
    """Return the exercise of that name; `variant` says whose numbers it has.

    >>> find("pass-the-token").family
    'ranks'
    >>> find("pass-a-token")
    Traceback (most recent call last):
        ...
    ValueError: there is no exercise 'pass-a-token'; did you mean 'pass-the-token'? mk.progress() lists them all

    Raises:
        ValueError: There is no exercise of that name, or nobody was handed out that variant.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"the exercise's name comes first, in quotes, and not {name!r}; mk.progress() lists them all"
        )
    if variant:
        Variant.read(variant)
    entries = {entry.name: entry for entry in _entries()}
    if name in entries:
        return replace(entries[name], variant=variant)
    near = difflib.get_close_matches(str(name), entries, 1, 0.5)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"there is no exercise {name!r}{meant} mk.progress() lists them all")


def solution_folders() -> list[Path]:
    """Return the folders in which solutions can be read: the exercises', and some of a checkout of mpkit."""
    specs = [find_spec(home) for home in HOMES]
    found = [Path(path) for spec in specs if spec for path in spec.submodule_search_locations or ()]
    checkout = Path(__file__).parents[2]
    beside = OF_A_CHECKOUT if (checkout / ".git").exists() else ()
    return [path for path in (*found, *(checkout / name for name in beside)) if path.is_dir()]


def _home() -> ModuleType:
    """Return the package of the exercises."""
    return import_module(next(home for home in HOMES if find_spec(home) is not None))


def _entries() -> list[ExerciseEntry]:
    """Return all exercises without importing any."""
    home = _home()
    return [
        ExerciseEntry(module.name.replace("_", "-"), family.name)
        for family in pkgutil.iter_modules(home.__path__)
        for module in pkgutil.iter_modules([f"{home.__path__[0]}/{family.name}"])
    ]
