"""Grading one notebook: collect its answers, judge them.

    collect    run a copy of the notebook in a process of its own
    judge      judge the answers in another process, on ranks of its own

A notebook that is broken, hangs or is hostile affects its own grade only: it runs enclosed (`enclose`) and under limits
(`guard`), and all that it leaves behind is removed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from mpkit.course.catalogue import solution_folders
from mpkit.course.framework.room import name_cell_lines
from mpkit.course.grading.collect import ENDED, STARTED
from mpkit.course.grading.grades import Grade
from mpkit.course.grading.judge_process import Judges
from mpkit.course.grading.submissions import HandedIn, NoNotebook, read_file
from mpkit.course.judge import not_judged
from mpkit.course.sandbox.guard import TOO_BUSY, Guard, sweep, way_to_enclose
from mpkit.course.verdict import Checked

AGAIN = "not judged, since this machine was too busy: the same command judges it again"
NOT_APART = "this system encloses no processes: look at the answers yourself"


class Grader:
    """Grades notebooks one after the other, in a folder that is thrown away; used as a context manager.

    The process that holds it should do nothing else: it ends all of its descendants between two notebooks.

    Args:
        guard: the limits on running a notebook.
    """

    def __init__(self, guard: Guard) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mpkit-grade-", ignore_cleanup_errors=True)
        self._base = Path(self._folder.name)
        place = self._base / "judge"
        place.mkdir()
        self._guard = replace(guard, hidden=(*guard.hidden, *map(str, solution_folders()), str(self._base)))
        limits = replace(guard, memory=guard.memory + 8 * 2**30, processes=guard.processes + 60)
        self._judges = Judges(place, environment(place), limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._judges.close()
        sweep(set)
        self._folder.cleanup()

    def all(self, submissions: Sequence[HandedIn]) -> Iterator[Grade]:
        """Yield the grades in order; while one notebook is judged, the next one runs."""
        with ThreadPoolExecutor(1) as ahead:
            coming = [ahead.submit(self._collect, each) for each in submissions[:1]]
            try:
                for number, each in enumerate(submissions):
                    collected = coming.pop().result()
                    for following in submissions[number + 1 : number + 2]:
                        coming.append(ahead.submit(self._collect, following))
                    yield _judge(each, collected, self._judges)
            finally:
                for left in coming:
                    left.cancel()
                sweep(set)  # interrupted: what runs ahead ends now, and not when its time is over

    def _collect(self, each: HandedIn) -> _NotebookAnswers:
        """Run a notebook, and collect its answers."""
        if each.broken:
            return _NotebookAnswers(notes=[each.broken])
        with tempfile.TemporaryDirectory(dir=self._base, ignore_cleanup_errors=True) as name:
            place = Path(name)
            out, work, cells = place / "answers", place / "work", place / "cells.json"
            out.mkdir()
            work.mkdir()
            cells.write_text(json.dumps(each.cells), encoding="utf-8")
            (work / "notebook.ipynb").write_bytes(each.data)
            command = [
                *(sys.executable, "-m", "mpkit.course.grading.collect"),
                *(str(cells), str(out), str(self._guard.memory)),
                *(f"{entry.name}={entry.exercise.name_of_answer}" for entry in each.exercises),
            ]
            why = self._guard.run(command, place, work, environment(place), self._judges.pids, out / STARTED)
            if not why and not (out / ENDED).exists():
                why = "it left before its last cell"
            collected = _NotebookAnswers(notes=[f"the notebook did not run to its end: {why}"] if why else [])
            if why.endswith(TOO_BUSY):
                collected.too_busy = why
            collected.notes += [NOT_APART] if way_to_enclose() == "none" else []
            collected.notes += _errors(_read_left_file(out / "cells.jsonl"))
            for entry in each.exercises:
                answer = _read_left_file(out / f"{entry.name}.answer")
                if answer is not None:
                    collected.answers[entry.name] = answer
                elif (reason := _read_left_file(out / f"{entry.name}.why")) is not None:
                    said = reason.decode("utf-8", "replace")[:300]
                    collected.remarks[entry.name] = f"no answer was found ({said})"
            return collected


def environment(place: Path) -> dict[str, str]:
    """Return the environment variables of a process that runs or judges answers and writes to a folder only."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
        "IPYTHONDIR": str(place / "ipython"),
        "TMPDIR": str(place),
    }


@dataclass
class _NotebookAnswers:
    """The answers of a notebook, and what went wrong while it ran."""

    answers: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)
    too_busy: str = ""


def _read_left_file(path: Path) -> bytes | None:
    """Return a file that a notebook wrote; None if it is not a readable file, as a notebook may put anything there."""
    try:
        return read_file(path)
    except NoNotebook:
        return None


def _judge(each: HandedIn, collected: _NotebookAnswers, judges: Judges) -> Grade:
    checked: dict[str, Checked | None] = dict.fromkeys(entry.name for entry in each.exercises)
    for entry in each.exercises:
        answer = collected.answers.get(entry.name)
        if answer is not None:
            checked[entry.name], why = judges.judge(entry, answer)
        elif collected.too_busy:
            checked[entry.name], why = not_judged(entry, collected.too_busy), ""
        else:
            continue
        one = checked[entry.name]
        if one is not None and one.not_judged:
            why = AGAIN
        if why:
            collected.remarks[entry.name] = why
    return Grade(each, checked, collected.notes, collected.remarks)


def _errors(log: bytes | None) -> list[str]:
    """Return the errors of cells, as far as they can be read from the log."""
    try:
        lines = (log or b"").decode("utf-8", "replace").splitlines()[:20]
        return [
            f"cell {int(one['cell'])}: {name_cell_lines(str(one['error'])[:500])}"
            for one in map(json.loads, lines)
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
