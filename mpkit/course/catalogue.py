"""Exercises by name: each is a module of a family's folder in `mpkit/course/exercises/`.

A family is a package. Its docstring is the beginning of the notebook: a title, then Markdown. The code after
`# %% given` is used by all of its exercises.
"""

import difflib
import pkgutil
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from inspect import getsource
from pathlib import Path
from types import ModuleType

from mpkit.course.exercise_text import ExerciseText, read_text
from mpkit.course.framework.exercise import HOME, Exercise
from mpkit.course.framework.source import ExerciseSource, given_in
from mpkit.course.signatures import FILE, Signature, read_signatures

OF_A_CHECKOUT = (".git", "build", "notebooks", "tests")
"""The folders of mpkit's repository that hold solutions as well."""


@dataclass(frozen=True)
class ExerciseEntry:
    """An exercise, by its name and its family.

    Attributes:
        name: the exercise's name, such as "ring-all-reduce".
        family: the family's name, such as "ranks".
    """

    name: str
    family: str

    @property
    def module(self) -> ModuleType:
        """The exercise's module."""
        return import_module(f"{HOME}.{self.family}.{self.name.replace('-', '_')}")

    @cached_property
    def exercise(self) -> Exercise:
        """The exercise that its author wrote."""
        exercise = self.module.EXERCISE
        assert isinstance(exercise, Exercise)
        return exercise.complete(self.module, self.source.answer, self.text.parts)

    @cached_property
    def text(self) -> ExerciseText:
        """What the student reads, hints and wrong answers: the file beside the module that ends in ".md"."""
        return read_text(self.text_path, self.module, self.source.plain)

    @property
    def text_path(self) -> Path:
        """The path of the exercise's text file."""
        return Path(str(self.module.__file__)).with_suffix(".md")

    @property
    def signatures(self) -> dict[str, Signature]:
        """What each wrong answer of the text did when it was recorded, by the mistake's name."""
        return read_signatures(self.text_path.parent / FILE).get(self.name, {})

    @property
    def given_code(self) -> str:
        """The code that a student has before the answer's cell: the family's, and the exercise's own."""
        return f"{given_in(getsource(import_module(f'{HOME}.{self.family}')))}\n\n{self.source.given}\n"

    @cached_property
    def source(self) -> ExerciseSource:
        """The exercise's Python file, in its parts."""
        return ExerciseSource.from_code(self.module.__name__, getsource(self.module))


def families() -> list[ModuleType]:
    """Return the packages of the families, in the order of the course."""
    packages = [import_module(f"{HOME}.{name}") for name in {entry.family for entry in _entries()}]
    return sorted(packages, key=lambda package: package.PLACE)


def of_family(family: str) -> list[ExerciseEntry]:
    """Return the exercises of a family, in their order."""
    entries = [entry for entry in _entries() if entry.family == family]
    return sorted(entries, key=lambda entry: (entry.exercise.place, entry.name))


def find(name: str) -> ExerciseEntry:
    """Return the exercise of that name.

    >>> find("pass-the-token").family
    'ranks'
    >>> find("pass-a-token")
    Traceback (most recent call last):
        ...
    ValueError: there is no exercise 'pass-a-token'; did you mean 'pass-the-token'? mk.progress() lists them all

    Raises:
        ValueError: There is no exercise of that name.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"the exercise's name comes first, in quotes, and not {name!r}; mk.progress() lists them all"
        )
    entries = {entry.name: entry for entry in _entries()}
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(str(name), entries, 1, 0.5)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"there is no exercise {name!r}{meant} mk.progress() lists them all")


def solution_folders() -> list[Path]:
    """Return the folders in which solutions can be read: the exercises', and some of a checkout of mpkit."""
    spec = find_spec(HOME)
    found = [Path(path) for path in spec.submodule_search_locations or ()] if spec else []
    checkout = Path(__file__).parents[2]
    beside = OF_A_CHECKOUT if (checkout / ".git").exists() else ()
    return [path for path in (*found, *(checkout / name for name in beside)) if path.is_dir()]


def _entries() -> list[ExerciseEntry]:
    """Return all exercises without importing any."""
    home = import_module(HOME)
    return [
        ExerciseEntry(module.name.replace("_", "-"), family.name)
        for family in pkgutil.iter_modules(home.__path__)
        for module in pkgutil.iter_modules([f"{home.__path__[0]}/{family.name}"])
    ]
