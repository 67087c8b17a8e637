"""Grading one notebook after the other: collect its answers, judge them, and write down the grade.

    read       read all notebooks before the first of them runs
    collect    run a copy of the notebook in a process of its own, while the previous one is judged
    judge      judge the answers in another process, on ranks of its own
    report     write each row as soon as it is known

A notebook that is broken, hangs or is hostile affects its own grade only: it runs enclosed (`enclose`) and under limits
(`guard`), and all that it leaves behind is removed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from mpkit.classroom.grading.collect import ENDED, STARTED
from mpkit.classroom.grading.guard import Guard, adopt_orphans, sweep, way_to_enclose
from mpkit.classroom.grading.handed_in import HandedIn, handed_in
from mpkit.classroom.grading.judging import Judges
from mpkit.classroom.grading.kept import Grade, Kept, key_of
from mpkit.classroom.grading.reading import NoNotebook, read_file
from mpkit.classroom.grading.report import Report
from mpkit.classroom.grading.same import suspicion
from mpkit.classroom.judge import Checked
from mpkit.support.visible import visible

__all__ = ["Grade", "grade"]

ENCLOSED = {
    "namespaces": "each notebook sees its own processes only, and writes to a folder of its own only",
    "landlock": "each notebook writes to a folder of its own only",
    "none": "this system encloses no processes: a notebook could do to your files what you can. Strangers' notebooks "
    "are better graded in a container",
}


@dataclass
class _Collected:
    """The answers of a notebook, and what went wrong while it ran."""

    answers: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)


def grade(
    folder: Path,
    exercises: tuple[str, ...] = (),
    *,
    output: Path | None = None,
    pages: Path | None = None,
    roster: Sequence[str] = (),
    again: bool = False,
    guard: Guard | None = None,
    say: Callable[[str], None] = print,
) -> list[Grade]:
    """Grade all notebooks below a folder.

    This process adopts all processes that the notebooks leave behind, and ends them; it should do nothing else.

    Args:
        folder: the folder of notebooks; see `mpkit.classroom.grading.handed_in`.
        exercises: the names of the exercises; none: all exercises of the families that a notebook contains.
        output: the path of the table, which is written after each notebook. The grades are kept beside it, so that a
            grading that was stopped can continue. None: write neither.
        pages: the folder of the students' pages; None: write none.
        roster: the names of all students, to list those who have handed in nothing.
        again: whether to grade again what is graded already.
        guard: the limits on running a notebook.
        say: called with one line per notebook.

    Raises:
        ValueError: There is nothing to grade in the folder.
    """
    submissions = handed_in(folder, exercises)
    guard = guard if guard is not None else Guard()
    report = Report(submissions, output, pages, roster)
    keys = {each.name: key_of(each, guard) for each in submissions}
    kept = Kept(output.with_suffix(".graded.jsonl") if output is not None else None, anew=again)
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
    for number, result in enumerate(_grades(new, guard), 1):
        kept.add(keys[result.handed_in.name], result)
        report.add(result)
        notes = result.all_notes
        noted = f" ({visible(notes[0])})" if notes else ""
        say(f"{number}/{len(new)} {result.handed_in.student}: {result.total} of {result.most}{noted}")
    # Write everything once more from memory, because a notebook may have changed the files in the meantime.
    grades = report.finish()
    kept.begin({keys[each.handed_in.name]: each for each in grades})
    return grades


def _grades(submissions: Sequence[HandedIn], guard: Guard) -> Iterator[Grade]:
    """Grade the notebooks one after the other; while one is judged, the next one runs."""
    if not submissions:
        return
    with (
        tempfile.TemporaryDirectory(prefix="mpkit-grade-", ignore_cleanup_errors=True) as name,
        ThreadPoolExecutor(1) as ahead,
    ):
        place = Path(name)
        judges = Judges(
            place, _environment(place), Guard(memory=guard.memory + 8 * 2**30, processes=guard.processes + 60)
        )
        try:
            coming = ahead.submit(_collect, submissions[0], guard, judges)
            for number, each in enumerate(submissions):
                collected = coming.result()
                if number + 1 < len(submissions):
                    coming = ahead.submit(_collect, submissions[number + 1], guard, judges)
                yield _judge(each, collected, judges)
        finally:
            coming.cancel()
            judges.close()
            sweep(set)


def _environment(place: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
        "IPYTHONDIR": str(place / "ipython"),
        "TMPDIR": str(place),
    }


def _collect(each: HandedIn, guard: Guard, judges: Judges) -> _Collected:
    """Run a notebook, and collect its answers."""
    if each.broken:
        return _Collected(notes=[each.broken])
    with tempfile.TemporaryDirectory(prefix="mpkit-grade-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        out, work, cells = place / "answers", place / "work", place / "cells.json"
        out.mkdir()
        work.mkdir()
        cells.write_text(json.dumps(each.cells), encoding="utf-8")
        (work / "notebook.ipynb").write_bytes(each.data)
        command = [
            *(sys.executable, "-m", "mpkit.classroom.grading.collect"),
            *(str(cells), str(out), str(guard.memory)),
            *(entry.name for entry in each.exercises),
        ]
        why = guard.run(command, place, work, _environment(place), judges.pids, out / STARTED)
        if not why and not (out / ENDED).exists():
            why = "it left before its last cell"
        collected = _Collected(notes=[f"the notebook did not run to its end: {why}"] if why else [])
        collected.notes += _errors(_left(out / "cells.jsonl"))
        for entry in each.exercises:
            answer = _left(out / f"{entry.name}.answer")
            if answer is not None:
                collected.answers[entry.name] = answer
            elif (reason := _left(out / f"{entry.name}.why")) is not None:
                collected.remarks[entry.name] = (
                    f"no answer was found ({reason.decode('utf-8', 'replace')[:300]})"
                )
        return collected


def _left(path: Path) -> bytes | None:
    """Return a file that a notebook wrote; None if it is not a readable file, as a notebook may put anything there."""
    try:
        return read_file(path)
    except NoNotebook:
        return None


def _judge(each: HandedIn, collected: _Collected, judges: Judges) -> Grade:
    checked: dict[str, Checked | None] = dict.fromkeys(entry.name for entry in each.exercises)
    for entry in each.exercises:
        answer = collected.answers.get(entry.name)
        if answer is None:
            continue
        checked[entry.name], why = judges.judge(entry, answer)
        one = checked[entry.name]
        if one is not None and one.passed:
            why = suspicion(entry, answer, each.cells)
        if why:
            collected.remarks[entry.name] = why
    return Grade(each, checked, collected.notes, collected.remarks)


def _errors(log: bytes | None) -> list[str]:
    """Return the errors of cells, as far as they can be read from the log."""
    try:
        lines = (log or b"").decode("utf-8", "replace").splitlines()[:20]
        return [f"cell {int(one['cell'])}: {str(one['error'])[:500]}" for one in map(json.loads, lines)]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
