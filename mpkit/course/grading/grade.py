"""Grading a class: which notebooks, in which order, and where the grades go.

read       read all notebooks before the first of them runs
kept       keep the grades of notebooks that have not changed since they were graded
grade      run and judge the others: one after the other, or several at a time, each in a process of its own
report     write each row as soon as it is known
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from mpkit.common.safe_text import visible
from mpkit.common.this_process import make_undumpable
from mpkit.course.grading.grader import Grader
from mpkit.course.grading.grades import Grade, GradeStore, key_of
from mpkit.course.grading.report import ClassReport, GradeReport
from mpkit.course.grading.roster import Roster
from mpkit.course.grading.submissions import HandedIn, handed_in
from mpkit.course.grading.workers import in_parallel
from mpkit.course.sandbox.guard import Guard, adopt_orphans, way_to_enclose

__all__ = ["ClassGrades", "grade"]

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
