"""Grading a class: which notebooks, in which order, and where the grades go.

read       read all notebooks before the first of them runs
kept       keep the grades of notebooks that have not changed since they were graded
grade      run and judge the others, one after the other; while one is judged, the next one runs
report     write each row as soon as it is known
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from mpkit.common.process_wide import make_undumpable
from mpkit.common.safe_text import visible
from mpkit.course.grading.grader import Grader
from mpkit.course.grading.grades import Grade, GradeStore, key_of, totals
from mpkit.course.grading.report import GradeReport
from mpkit.course.grading.submissions import handed_in
from mpkit.course.sandbox.guard import Guard, adopt_orphans, way_to_enclose

ENCLOSED = {
    "namespaces": "each notebook and each answer sees its own processes only, writes to a folder of its own only, and "
    "reads neither solutions nor other notebooks",
    "landlock": "each notebook and each answer writes to a folder of its own only, and reads neither solutions nor "
    "other notebooks",
    "none": "this system encloses no processes: a notebook could do to your files what you can. Strangers' notebooks "
    "are better graded in a container",
}


def grade(
    folder: Path,
    exercises: tuple[str, ...] = (),
    *,
    output: Path,
    guard: Guard | None = None,
    say: Callable[[str], None] = print,
) -> str:
    """Grade all notebooks below a folder, and return what the class found hard.

    This process adopts all processes that the notebooks leave behind, and ends them; it should do nothing else.

    Args:
        folder: the folder of notebooks; see `mpkit.course.grading.submissions`.
        exercises: the names of the exercises; none: all exercises of the families that a notebook contains.
        output: the path of the table, which is written after each notebook. The students' pages and the grades so far,
            from which a grading that was stopped continues, lie beside it.
        guard: the limits on running a notebook.
        say: called with one line per notebook.

    Raises:
        ValueError: There is nothing to grade in the folder, or the grades so far cannot be read.
    """
    submissions = handed_in(folder, exercises)
    guard = replace(guard or Guard(), hidden=tuple(_hideable(folder, output.with_suffix(""))))
    report = GradeReport(submissions, output)
    keys = {each.name: key_of(each, guard) for each in submissions}
    store = GradeStore(output.with_suffix(".graded.json"))
    known = {each.name: old for each in submissions if (old := store.get(keys[each.name], each)) is not None}
    new = [each for each in submissions if each.name not in known]
    if known:
        say(f"{len(known)} of {len(submissions)} are graded already and have not changed")
    report.add(*known.values())
    adopt_orphans()
    make_undumpable()
    say(ENCLOSED[way_to_enclose()])
    with Grader(guard) as grader:
        for number, result in enumerate(grader.all(new), 1):
            store.add(keys[result.handed_in.name], result)
            report.add(result)
            say(f"{number}/{len(new)} {_in_a_line(result)}")
    report.finish()
    return report.summary()


def _hideable(*folders: Path) -> Iterator[str]:
    """Yield the class's folders, so that no notebook reads another one; not one that has Python or mpkit in it."""
    needed = [os.path.realpath(path) for path in (*sys.path, sys.prefix, sys.base_prefix) if path]
    for path in map(os.path.realpath, folders):
        if not any(f"{each}/".startswith(f"{path}/") for each in needed):
            yield path


def _in_a_line(result: Grade) -> str:
    points, most = totals([result])
    notes = result.all_notes
    noted = f" ({visible(notes[0])})" if notes else ""
    judged = "" if result.is_whole else ", and not all is judged"
    return f"{result.handed_in.student}: {points} of {most}{judged}{noted}"
