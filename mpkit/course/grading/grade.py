"""Grading a class: which notebooks, in which order, and where the grades go.

read       read all notebooks before the first of them runs
kept       keep the grades of notebooks that have not changed since they were graded
grade      run and judge the others: one after the other, or several at a time, each in a process of its own
report     write each row as soon as it is known
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from inspect import getsource
from pathlib import Path
from typing import Any

from mpkit.common.safe_text import visible
from mpkit.common.this_process import make_undumpable
from mpkit.course.grading.grader import Grader
from mpkit.course.grading.report import ClassReport, Grade, GradeReport
from mpkit.course.grading.roster import Roster
from mpkit.course.grading.submissions import HandedIn, handed_in
from mpkit.course.grading.workers import in_parallel
from mpkit.course.sandbox.guard import Guard, adopt_orphans, way_to_enclose

__all__ = ["ClassGrades", "GradeStore", "grade", "key_of"]

ENCLOSED = {
    "namespaces": "each notebook and each answer sees its own processes only, writes to a folder of its own only, and "
    "reads neither solutions nor other notebooks",
    "landlock": "each notebook and each answer writes to a folder of its own only, and reads neither solutions nor "
    "other notebooks",
    "none": "this system encloses no processes: a notebook could do to your files what you can. Strangers' notebooks "
    "are better graded in a container",
}


@dataclass(frozen=True)
class ClassGrades:
    """A graded class.

    Attributes:
        grades: the grades, in the order of the notebooks.
        report: what the class found hard.
    """

    grades: tuple[Grade, ...]
    report: ClassReport


def grade(
    folder: Path,
    exercises: tuple[str, ...] = (),
    *,
    output: Path | None = None,
    pages: Path | None = None,
    roster: Roster | None = None,
    due: datetime | None = None,
    again: bool = False,
    guard: Guard | None = None,
    jobs: int = 1,
    say: Callable[[str], None] = print,
) -> ClassGrades:
    """Grade all notebooks below a folder.

    This process adopts all processes that the notebooks leave behind, and ends them; it should do nothing else.

    Args:
        folder: the folder of notebooks; see `mpkit.course.grading.submissions`.
        exercises: the names of the exercises; none: all exercises of the families that a notebook contains.
        output: the path of the table, which is written after each notebook. The grades are kept beside it, so that a
            grading that was stopped can continue. None: write neither.
        pages: the folder of the students' pages; None: write none.
        roster: the names of all students, to list those who have handed in nothing; it may say when the others have.
        due: when the notebooks were due; late ones are marked.
        again: whether to grade again what is graded already.
        guard: the limits on running a notebook.
        jobs: how many notebooks are graded at a time.
        say: called with one line per notebook.

    Raises:
        ValueError: There is nothing to grade in the folder, or there are less than one job.
    """
    if jobs < 1:
        raise ValueError(f"--jobs {jobs}: at least one notebook is graded at a time; --jobs 2 grades two")
    submissions = handed_in(folder, exercises)
    guard = replace(guard or Guard(), hidden=tuple(_hideable(folder, pages)))
    report = GradeReport(submissions, output, pages, roster, due)
    keys = {each.name: key_of(each, guard) for each in submissions}
    kept = GradeStore(output.with_suffix(".graded.jsonl") if output is not None else None, anew=again)
    known = {each.name: old for each in submissions if (old := kept.get(keys[each.name], each)) is not None}
    kept.begin({keys[name]: old for name, old in known.items()})
    new = [each for each in submissions if each.name not in known]
    if known:
        say(
            f"{len(known)} of {len(submissions)} are graded already and have not changed (--again grades them too)"
        )
    report.add(*known.values())
    adopt_orphans()
    say(ENCLOSED[way_to_enclose()])
    for number, result in enumerate(_grades(new, guard, jobs), 1):
        kept.add(keys[result.handed_in.name], result)
        report.add(result)
        say(f"{number}/{len(new)} {_in_a_line(result)}")
    # Everything is written once more from memory, because a notebook may have changed the files in the meantime.
    grades = report.finish()
    kept.begin({keys[each.handed_in.name]: each for each in grades})
    return ClassGrades(tuple(grades), report.of_class())


def _hideable(*folders: Path | None) -> Iterator[str]:
    """Yield the class's folders, so that no notebook reads another one; not one that has Python or mpkit in it."""
    needed = [os.path.realpath(path) for path in (*sys.path, sys.prefix, sys.base_prefix) if path]
    for folder in folders:
        if folder is not None:
            path = os.path.realpath(folder)
            if not any(f"{each}/".startswith(f"{path}/") for each in needed):
                yield path


def _in_a_line(result: Grade) -> str:
    notes = result.all_notes
    noted = f" ({visible(notes[0])})" if notes else ""
    judged = "" if result.is_whole else ", and not all is judged"
    return f"{result.handed_in.student}: {result.total} of {result.most}{judged}{noted}"


def _grades(submissions: Sequence[HandedIn], guard: Guard, jobs: int) -> Iterator[Grade]:
    """Yield the grades as they are finished; one at a time keeps the order."""
    make_undumpable()
    if jobs > 1 and len(submissions) > 1:
        yield from in_parallel(submissions, guard, jobs)
    elif submissions:
        with Grader(guard) as grader:
            yield from grader.all(submissions)


# ---- kept

VERSION = 6


def key_of(each: HandedIn, guard: Guard) -> str:
    """Return a digest of all that a grade depends on: the notebook, the exercises' own files, the limits."""
    sources = [
        getsource(entry.module) + entry.text_path.read_text(encoding="utf-8") for entry in each.exercises
    ]
    names = [entry.name for entry in each.exercises]
    told = [VERSION, each.name, each.digest, names, sources, each.questions, dict(each.predicted)]
    return hashlib.sha256(json.dumps([*told, asdict(replace(guard, hidden=()))]).encode()).hexdigest()


class GradeStore:
    """The grades so far, in a file beside the table with one line per notebook: a stopped grading goes on from it.

    Args:
        path: the path of the file; None: no grades are kept.
        anew: whether to ignore the grades that are in it.
    """

    def __init__(self, path: Path | None, *, anew: bool = False) -> None:
        self._path = path
        self._lines: dict[str, dict[str, Any]] = {}
        if path is None or anew or not path.is_file():
            return
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
            try:  # if a line was cut short or changed, its notebook is graded again
                entry = json.loads(line)
                self._lines[str(entry["key"])] = dict(entry["grade"])
            except (ValueError, TypeError, KeyError, RecursionError):
                continue

    def get(self, key: str, handed_in: HandedIn) -> Grade | None:
        """Return the grade of that key, if there is one."""
        try:
            return Grade.of_json(handed_in, self._lines[key]) if key in self._lines else None
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def begin(self, kept: Mapping[str, Grade]) -> None:
        """Replace the file by one with these grades only."""
        if self._path is None:
            return
        partial = self._path.with_name(self._path.name + ".partial")
        whole = [_line(key, grade) for key, grade in kept.items() if grade.is_whole]
        partial.write_text("".join(whole), encoding="utf-8")
        partial.replace(self._path)

    def add(self, key: str, grade: Grade) -> None:
        """Append one grade to the file; one that is not whole is no grade, and its notebook is graded again."""
        if self._path is not None and grade.is_whole:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(key, grade))


def _line(key: str, grade: Grade) -> str:
    return json.dumps({"key": key, "notebook": grade.handed_in.name, "grade": grade.to_json()}) + "\n"
