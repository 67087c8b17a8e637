"""The command line's classroom: `python -m mpkit grade` and `exercises`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["add_classroom"]


def add_classroom(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands for instructors."""
    _add_grade(commands)
    _add_exercises(commands)


def _add_grade(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    grade = commands.add_parser(
        "grade",
        help="grade the exercise notebooks of a class",
        description="Runs each notebook below FOLDER (STUDENT.ipynb or STUDENT/NOTEBOOK.ipynb) in a process of its "
        "own, checks its answers on ranks of their own, and writes a table of the class and a page with hints for "
        "each student. The table grows with each notebook; a grading that was stopped goes on where it stopped, and "
        "one that is repeated grades only notebooks that are new or changed. A notebook is enclosed as far as this "
        "system allows without root, which is said first: where it allows nothing, grade strangers' in a container.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    grade.add_argument("folder", type=Path, help="with the notebooks")
    grade.add_argument("-o", "--output", type=Path, default=Path("grades.csv"), help="the table")
    grade.add_argument("--pages", type=Path, help="folder of the students' pages; left out: beside the table")
    grade.add_argument(
        "--exercises", default="", help="names with commas between; left out: all of a notebook's families"
    )
    _about_students(grade)
    grade.add_argument(
        "--gradescope",
        type=Path,
        help="also write results.json as Gradescope reads it: into this .json file, all of FOLDER as one student's, or "
        "into this folder, a file per student",
    )
    grade.add_argument("-j", "--jobs", type=int, default=1, help="notebooks that are graded at a time")
    grade.add_argument("--again", action="store_true", help="grade also what is graded already and unchanged")
    grade.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="that running a notebook may take, without the start of Python and torch",
    )
    grade.add_argument("--memory", type=float, default=4.0, help="GiB that a notebook may take")
    grade.add_argument("--processes", type=int, default=40, help="that a notebook may run at a time")
    grade.set_defaults(run=_grade)


def _about_students(grade: argparse.ArgumentParser) -> None:
    """Add the options that say who the students are, and what they were given until when."""
    grade.add_argument(
        "--roster",
        type=Path,
        help="names of all students, one per line or a CSV: the table tells who is missing. Columns handed_in and due "
        "of a CSV say when a student handed in, and who has longer",
    )
    grade.add_argument(
        "--course",
        default="",
        help="the text that `exercises --course` was given: each student's answers are judged with numbers of their "
        "own, and whoever handed in somebody else's notebook is named",
    )
    grade.add_argument(
        "--due",
        help="when the notebooks were due, such as 2026-11-20 or 2026-11-20T18:00; late ones are marked, by the "
        "roster's column handed_in, nbgrader's timestamp.txt, or the time of the file",
    )


def _add_exercises(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    write = commands.add_parser(
        "exercises",
        help="write the exercise notebooks",
        description="Writes the exercises as notebooks: for students into FOLDER, solved into FOLDER/solved, and for "
        "nbgrader into FOLDER/nbgrader/source. With --roster and --course: notebooks for each student, with numbers of "
        "their own, into FOLDER/students/NAME, and solved into FOLDER/solved/NAME.",
    )
    write.add_argument("folder", type=Path)
    write.add_argument("--roster", type=Path, help="names of all students, as `grade --roster` reads them")
    write.add_argument(
        "--course",
        default="",
        help="any text, such as pp-2026-x7: everybody's numbers follow from it and the name. Students should not "
        "know it, and grading needs it",
    )
    write.add_argument(
        "--justify",
        action="store_true",
        help="ask for a justification after each check of students' notebooks",
    )
    write.add_argument(
        "--exam",
        action="store_true",
        help="checks of students' notebooks say only whether there is an answer that runs: no verdict, no hints",
    )
    write.add_argument(
        "--otter",
        action="store_true",
        help="write only source notebooks for `otter assign`, into FOLDER/otter/NAME",
    )
    write.set_defaults(run=_exercises)


def _grade(options: argparse.Namespace) -> None:
    try:
        import IPython  # noqa: F401  # the notebooks' processes need it

        from mpkit.course.grading.grade import grade
        from mpkit.course.grading.gradescope import write_gradescope
        from mpkit.course.grading.roster import due_date, read_roster
        from mpkit.course.sandbox.guard import Guard
    except ImportError as error:
        raise ValueError(
            f"grading runs notebooks, and their packages are not here ({error}): pip install 'mpkit[notebook]'"
        ) from None

    if not options.output.parent.is_dir():
        raise ValueError(f"-o {options.output}: there is no folder {options.output.parent} to write it into")
    guard = Guard(options.seconds, int(options.memory * 2**30), options.processes)
    names = tuple(name.strip() for name in options.exercises.split(",") if name.strip())
    pages = options.pages or options.output.with_suffix("")
    roster = read_roster(options.roster) if options.roster is not None else None
    due = due_date(options.due) if options.due is not None else None
    try:
        graded = grade(
            options.folder, names, output=options.output, pages=pages, roster=roster, course=options.course,
            due=due, again=options.again, guard=guard, jobs=options.jobs,
        )  # fmt: skip
    except KeyboardInterrupt:
        said = f"interrupted; {options.output} has what is graded, and the same command goes on from there"
        print(f"mpkit: {said}", file=sys.stderr)
        raise SystemExit(130) from None
    print(f"\n{graded.report}\n")
    if options.gradescope is not None:
        written = write_gradescope(options.gradescope, graded.grades)
        print(f"{options.gradescope}: results.json for Gradescope, {len(written)} in all")
    report = options.output.with_suffix(".class.html")
    print(f"{options.output}: the class; {pages}: a page per student; {report}: what the class found hard")


def _exercises(options: argparse.Namespace) -> None:
    from mpkit.course.grading.roster import read_roster
    from mpkit.course.notebooks import link_tutorials, write_notebooks, write_variants
    from mpkit.course.otter import write_otter

    if options.otter:
        if options.roster is not None or options.exam or options.justify:
            raise ValueError(
                "--otter writes one notebook per family for all, with hints: exercises FOLDER --otter, without "
                "--roster, --exam and --justify"
            )
        for path in write_otter(options.folder):
            print(path)
        return
    if options.roster is not None:
        names = read_roster(options.roster).names
        many = len(
            write_variants(options.folder, options.course, names, justify=options.justify, exam=options.exam)
        )
        print(f"{options.folder}: {many} notebooks; students/NAME is for handing out, solved/NAME for you")
        return
    if options.course:
        raise ValueError(
            "--course is for numbers by student: exercises FOLDER --course TEXT --roster ROSTER.csv"
        )
    written = write_notebooks(options.folder, justify=options.justify, exam=options.exam)
    for path in (*written, *link_tutorials(options.folder)):
        print(path)
