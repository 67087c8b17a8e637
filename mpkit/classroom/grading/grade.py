"""Notebook after notebook: collect its answers, judge them, write down what was found.

A notebook that is broken, hangs or is hostile costs its own grade only: it runs in a process of its own (`collect`),
its answers on ranks of theirs, and after each nothing of it is left.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mpkit.classroom.catalogue import Entry
from mpkit.classroom.grading.guard import Guard, adopt_orphans, sweep
from mpkit.classroom.grading.handed_in import HandedIn, handed_in
from mpkit.classroom.judge import Checked, judge
from mpkit.classroom.room import Answer, Limits, Room

__all__ = ["Grade", "grade"]

FAILURES = 1
"""Reports give the second hint: who reads one has tried."""


@dataclass(frozen=True)
class Grade:
    """What one notebook got.

    Attributes:
        handed_in: the notebook.
        checked: by exercise; None where there was no answer.
        notes: what went wrong with the notebook as a whole, or with its cells.
    """

    handed_in: HandedIn
    checked: dict[str, Checked | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def points(self, entry: Entry) -> int:
        """For one exercise."""
        checked = self.checked.get(entry.name)
        return entry.exercise.points if checked is not None and checked.passed else 0

    @property
    def total(self) -> int:
        """Of all."""
        return sum(self.points(entry) for entry in self.handed_in.exercises)

    @property
    def most(self) -> int:
        """What could be had."""
        return sum(entry.exercise.points for entry in self.handed_in.exercises)


def grade(
    folder: Path,
    exercises: tuple[str, ...] = (),
    *,
    guard: Guard | None = None,
    limits: Limits | None = None,
    say: Callable[[str], None] = print,
) -> list[Grade]:
    """Grade all notebooks below a folder.

    This process becomes the parent of all that the notebooks leave behind, and ends it: it should do nothing else.

    Args:
        folder: see `mpkit.classroom.grading.handed_in`.
        exercises: names; none: all of the families that a notebook has exercises of.
        guard: limits of running a notebook.
        limits: of a case of a check.
        say: told a line a notebook.

    Raises:
        ValueError: nothing to grade there.
    """
    found = handed_in(folder, exercises)
    guard = guard if guard is not None else Guard()
    limits = limits if limits is not None else Limits(memory=2**30)
    adopt_orphans()
    grades = []
    room = Room(limits=limits)
    try:
        for number, each in enumerate(found, 1):
            result = _grade(each, room, guard)
            grades.append(result)
            say(f"{number}/{len(found)} {each.student}: {result.total} of {result.most}{_noted(result)}")
    finally:
        room.close()
        sweep(set())
    return grades


def _grade(each: HandedIn, room: Room, guard: Guard) -> Grade:
    if each.broken:
        return Grade(each, dict.fromkeys((entry.name for entry in each.exercises), None), (each.broken,))
    with tempfile.TemporaryDirectory(prefix="mpkit-grade-") as name:
        place = Path(name)
        out, work = place / "answers", place / "work"
        out.mkdir()
        work.mkdir()
        # ---- collect
        command = [
            *(sys.executable, "-m", "mpkit.classroom.grading.collect"),
            *(str(each.path.resolve()), str(out), str(guard.memory)),
            *(entry.name for entry in each.exercises),
        ]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
            "IPYTHONDIR": str(place / "ipython"),
        }
        why = guard.run(command, work, environment, room.pids)
        notes = [f"the notebook did not run to its end: {why}"] if why else []
        notes += _errors(out / "cells.jsonl")
        # ---- judge
        checked: dict[str, Checked | None] = {}
        for entry in each.exercises:
            file = out / f"{entry.name}.answer"
            answer = Answer(file.read_bytes(), entry.exercise.name_of_answer) if file.is_file() else None
            checked[entry.name] = judge(entry, answer, room, FAILURES, draw=False) if answer else None
            sweep(room.pids)
    return Grade(each, checked, tuple(notes))


def _errors(log: Path) -> list[str]:
    """Of cells, as far as they were written down."""
    try:
        lines = log.read_text(encoding="utf-8").splitlines()[:20]
        return [f"cell {one['cell']}: {one['error']}" for one in map(json.loads, lines)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _noted(result: Grade) -> str:
    return f" ({result.notes[0]})" if result.notes else ""
