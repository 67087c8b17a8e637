"""The command line's classroom: `python -m mpkit grade` and `exercises`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpkit.cli.parser import Commands, add_command

__all__ = ["add_classroom"]


def add_classroom(commands: Commands) -> None:
    """Add the commands for instructors."""
    _add_grade(commands)
    _add_exercises(commands)


def _add_grade(commands: Commands) -> None:
    grade = add_command(
        commands, "grade", "grade the exercise notebooks of a class",
        "It runs each notebook in FOLDER (STUDENT.ipynb or STUDENT/NOTEBOOK.ipynb) in a process of its own, checks the "
        "answers on ranks, and writes a table of the class and, beside it, a page with hints for each student. The "
        "table grows with each notebook. The same command continues a grading that was stopped, and grades again only "
        "what has changed. Each notebook is confined as far as this system permits without root; a first line says how "
        "far. Where the system permits nothing, grade strangers' notebooks in a container.",
        example="mpkit grade handed-in/ -o grades.csv", run=_grade,
    )  # fmt: skip
    grade.add_argument("folder", type=Path, metavar="FOLDER", help="the folder with the notebooks")
    grade.add_argument(
        "-o", "--output", type=Path, default=Path("grades.csv"), metavar="FILE", help="file for the table"
    )
    grade.add_argument(
        "--exercises", default="", metavar="NAMES",
        help="exercises to grade, as a list with commas (default: all families in a notebook)",
    )  # fmt: skip
    grade.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="time limit of a notebook, after Python and torch have started",
    )
    grade.add_argument(
        "--memory", type=float, default=4.0, metavar="GIB", help="memory limit of a notebook in GiB"
    )


def _add_exercises(commands: Commands) -> None:
    write = add_command(
        commands, "exercises", "write the exercise notebooks",
        "Students' notebooks go to FOLDER, solved ones to FOLDER/solved, and nbgrader's to FOLDER/nbgrader/source.",
        example="mpkit exercises class/", run=_exercises,
    )  # fmt: skip
    write.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to write to")
    write.add_argument(
        "--record", default="", metavar="NAMES",
        help="before that, run the wrong answers of these exercises, a list with commas or all, and keep what they do: "
        "checks recognize mistakes by it. For authors, after a change of an exercise",
    )  # fmt: skip


def _grade(options: argparse.Namespace) -> None:
    try:
        import IPython  # noqa: F401  # the notebooks' processes need it

        from mpkit.course.grading.grade import grade
        from mpkit.course.sandbox.guard import Guard
    except ImportError as error:
        raise ValueError(
            f"grading runs notebooks, and their packages are not here ({error}): pip install 'mpkit[notebook]'"
        ) from None

    if not options.output.parent.is_dir():
        raise ValueError(f"-o {options.output}: there is no folder {options.output.parent} to write it into")
    guard = Guard(options.seconds, int(options.memory * 2**30))
    names = tuple(name.strip() for name in options.exercises.split(",") if name.strip())
    try:
        summary = grade(options.folder, names, output=options.output, guard=guard)
    except KeyboardInterrupt:
        said = f"interrupted; {options.output} has what is graded, and the same command goes on from there"
        print(f"mpkit: {said}", file=sys.stderr)
        raise SystemExit(130) from None
    print(f"\n{summary}\n\n{options.output}: the class; {options.output.with_suffix('')}: a page per student")


def _exercises(options: argparse.Namespace) -> None:
    from mpkit.course.catalogue import families, find, of_family
    from mpkit.course.framework.kinds import Questions
    from mpkit.course.framework.room import shared_room
    from mpkit.course.notebooks import link_tutorials, write_notebooks
    from mpkit.course.signatures import record_signatures

    names = [name.strip() for name in options.record.split(",") if name.strip()]
    every = [entry for package in families() for entry in of_family(package.__name__.rpartition(".")[2])]
    for entry in every if names == ["all"] else map(find, names):
        if not isinstance(entry.exercise, Questions):  # whose wrong values are in the text
            for fault in record_signatures(entry, shared_room()):
                print(fault)
    for path in (*write_notebooks(options.folder), *link_tutorials(options.folder)):
        print(path)
