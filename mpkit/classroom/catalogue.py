"""Exercises by name: each is a module of a family's folder in `mpkit/classroom/exercises/`.

A family is a package, whose docstring is the notebook's beginning: a title, then Markdown; and after `# %% given` code
that all of its exercises use.
"""

from __future__ import annotations

import difflib
import pkgutil
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType

import mpkit.classroom.exercises as home
from mpkit.classroom.exercise import Exercise
from mpkit.classroom.source import Source, given_in

__all__ = ["Entry", "families", "find", "of_family"]


@dataclass(frozen=True)
class Entry:
    """An exercise and where it is.

    Attributes:
        name: such as "ring-all-reduce".
        family: such as "ranks".
    """

    name: str
    family: str

    @property
    def module(self) -> str:
        """Its module's name."""
        return f"{home.__name__}.{self.family}.{self.name.replace('-', '_')}"

    @cached_property
    def exercise(self) -> Exercise:
        """What its author wrote."""
        found = import_module(self.module).EXERCISE
        assert isinstance(found, Exercise)
        return found

    @property
    def given(self) -> str:
        """The code that a student has before the answer's cell: the family's, and the exercise's own."""
        package = import_module(self.module.rpartition(".")[0])
        return f"{given_in(package)}\n\n{self.source.given}\n"

    @cached_property
    def source(self) -> Source:
        """Its file, in parts."""
        return Source.of(import_module(self.module))


def families() -> list[ModuleType]:
    """The packages, in the order of the course."""
    found = [import_module(f"{home.__name__}.{each.name}") for each in pkgutil.iter_modules(home.__path__)]
    return sorted(found, key=lambda package: package.PLACE)


def of_family(family: str) -> list[Entry]:
    """Its exercises, in their order."""
    found = [entry for entry in _entries() if entry.family == family]
    return sorted(found, key=lambda entry: (entry.exercise.place, entry.name))


def find(name: str) -> Entry:
    """The exercise of that name.

    >>> find("pass-the-token").family
    'ranks'
    >>> find("pass-a-token")
    Traceback (most recent call last):
        ...
    ValueError: there is no exercise 'pass-a-token'; did you mean 'pass-the-token'? mk.progress() lists them all

    Raises:
        ValueError: there is none.
    """
    entries = {entry.name: entry for entry in _entries()}
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(str(name), entries, 1, 0.5)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"there is no exercise {name!r}{meant} mk.progress() lists them all")


def _entries() -> list[Entry]:
    """All of them, without importing any."""
    return [
        Entry(module.name.replace("_", "-"), family.name)
        for family in pkgutil.iter_modules(home.__path__)
        for module in pkgutil.iter_modules([f"{home.__path__[0]}/{family.name}"])
    ]
