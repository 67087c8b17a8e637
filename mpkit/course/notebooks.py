"""The exercises' notebooks, written from their files: for students, solved, and for nbgrader.

    student    the text, the given code, a stub, and the check
    solved     the solution in place of the stub; the check has to pass
    nbgrader   a source notebook: solutions and hidden tests between nbgrader's markers, and its metadata

Each family has one notebook of each kind. The notebooks depend on the exercises only, so that a test can compare them.
Each tutorial gets a last cell with links to the exercises that it prepares for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from inspect import getsource
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from mpkit.course.catalogue import ExerciseEntry, families, of_family
from mpkit.course.framework.source import BEGIN, END, IMPORTS, given_in
from mpkit.course.framework.variants import NOT_IN_FILES, Variant, plainly

__all__ = [
    "METADATA",
    "NBGRADER",
    "Kind",
    "link_tutorials",
    "notebook",
    "notebooks",
    "write_notebooks",
    "write_variants",
    "your_turn",
]

Kind = Literal["student", "solved", "nbgrader"]
HIDDEN = ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")
WORDS = {
    "student": "Run the first cell. Then write your answer in the cells that say so, and run the check below each: a "
    "wrong answer gets a hint, and a better one each time. Besides results and budgets, the checks measure what each "
    "rank does against what a right answer needs: it may compute at most 1.75 times as much, use 3 times the memory "
    "for its own tensors, and send 2.5 times the bytes and 6 times as many messages and collectives. Serial training "
    "on every rank is right, but not parallel. A box that asks for a prediction keeps your first number for the grade.",
    "solved": "These are the solutions. Look at them once your answer passes, or if it has failed for too long.",
    "nbgrader": "Write your answer in the cells that say so, and run the check below each.",
}
IN_AN_EXAM = (
    "Run the first cell. Then write your answers in the cells that say so. The check below each says whether there "
    "is an answer that runs, but not whether it is right."
)
NBGRADER = '''\
"""nbgrader's configuration for the notebooks in source/, written by `mpkit exercises`."""

c = get_config()

c.CourseDirectory.course_id = "mpkit"
# What a student finds in place of a solution: mk.check knows by it that nothing is written yet.
c.ClearSolutions.code_stub = {"python": 'raise NotImplementedError("your turn")'}
# Seconds for one cell. A check tries several cases on ranks, and each may hang; nbgrader's own 30 s are too few.
c.ExecutePreprocessor.timeout = 600
'''
TURN = "your-turn"
"""The id of the tutorials' last cell."""
JUSTIFICATION = "justification"
"""The tag of a cell in which a student says why the answer is right."""
ASKED = "*Why is your answer right, and why within its budgets? Some sentences, in place of this one.*"
"""What is in such a cell when it is handed out."""
KINDS_OF_A_STUDENT: tuple[tuple[Kind, str], ...] = (("student", "students"), ("solved", "solved"))
"""The kinds of notebooks that each student of a roster has, and the folder of each."""
METADATA = "mpkit"
"""The key of the metadata that say whose numbers a notebook has."""
UP = {"student": "../", "solved": "../../"}
"""The path from the notebook's folder to the tutorials."""


def write_notebooks(folder: Path, *, justify: bool = False, exam: bool = False) -> list[Path]:
    """Write all notebooks below a folder, and return their paths.

    Student notebooks lie in the folder itself, solved ones in `solved/`, nbgrader's in `nbgrader/source/`, below its
    configuration.

    Args:
        folder: the folder.
        justify: whether students' notebooks ask for a justification after each check.
        exam: whether their checks say only if there is an answer.
    """
    import nbformat

    written = []
    for path, book in notebooks():
        if exam and path.parent == Path("."):
            _for_exam(book)
        if justify and path.parent == Path("."):
            book.cells = list(_add_justifications(book.cells))
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(book, target)
        written.append(target)
    written.append(folder / "nbgrader" / "nbgrader_config.py")
    written[-1].write_text(NBGRADER, encoding="utf-8")
    return written


def write_variants(
    folder: Path, course: str, students: Sequence[str], *, justify: bool = False, exam: bool = False
) -> list[Path]:
    """Write notebooks for each student of a course, with numbers of their own; return their paths.

    What is handed out lies in `students/NAME/`, the solutions of it in `solved/NAME/`.

    Args:
        folder: the folder.
        course: the course; whoever knows this text can compute everybody's numbers.
        students: the names of the students.
        justify: whether the notebooks ask for a justification after each check.
        exam: whether their checks say only if there is an answer.

    Raises:
        ValueError: The course has no name, or two students' names are the same but for case and underscores.
    """
    import nbformat

    if not course.strip():
        raise ValueError(
            "--roster needs --course TEXT too, from which everybody's numbers follow: keep it for grading"
        )
    folders = {plainly(name): re.sub(NOT_IN_FILES, "_", name) for name in students}
    if len(folders) < len(students) or len(set(folders.values())) < len(folders):
        twice = sorted(name for name in students if [*map(plainly, students)].count(plainly(name)) > 1)
        raise ValueError(
            f"--roster: {', '.join(map(repr, twice or students))} would share a folder and its numbers; give each a "
            "name of their own, such as 'kim lee 2'"
        )
    written = []
    for name in students:
        for kind, home in KINDS_OF_A_STUDENT:
            target = folder / home / folders[plainly(name)]
            target.mkdir(parents=True, exist_ok=True)
            for package in families():
                book = notebook(package, kind, str(Variant.for_student(course, name)))
                if exam and kind == "student":
                    _for_exam(book)
                if justify and kind == "student":
                    book.cells = list(_add_justifications(book.cells))
                written.append(target / f"{_name(package)}.ipynb")
                nbformat.write(book, written[-1])
    return written


def _for_exam(book: Any) -> None:
    """Change a student's notebook into one for an exam: its metadata say so, and its checks give no verdict."""
    book.metadata.setdefault(METADATA, {})["exam"] = True
    for cell in book.cells:
        if cell.id == "start-text":
            cell.source = cell.source.replace(WORDS["student"], IN_AN_EXAM)
        if cell.id.endswith("-check"):
            cell.source = cell.source.removesuffix(")") + ", exam=True)"
    tells = ("end-text", "progress", "-predict", "-predicted")  # the last shows what is right
    book.cells = [cell for cell in book.cells if not cell.id.endswith(tells)]


def _add_justifications(cells: list[Any]) -> Iterator[Any]:
    """Yield the cells, and after each check one for a justification."""
    import nbformat

    for cell in cells:
        yield cell
        if cell.id.endswith("-check"):
            name = cell.id.removesuffix("-check")
            tags = {"tags": [JUSTIFICATION, f"for:{name}"]}
            yield nbformat.v4.new_markdown_cell(ASKED, id=f"{name[:50]}-why", metadata=tags)


def notebooks() -> Iterator[tuple[Path, Any]]:
    """Yield the path and the content of each notebook."""
    for package in families():
        name = _name(package)
        yield Path(f"{name}.ipynb"), notebook(package, "student")
        yield Path("solved") / f"{name}.ipynb", notebook(package, "solved")
        yield Path("nbgrader") / "source" / name / f"{name}.ipynb", notebook(package, "nbgrader")


def link_tutorials(folder: Path) -> list[Path]:
    """Write the last cell of each tutorial in the parent folder; return the tutorials that changed."""
    import nbformat

    changed = []
    for path in sorted(folder.absolute().parent.glob("[0-9]*.ipynb")):
        book = nbformat.read(path, as_version=4)
        words = your_turn(path.stem)
        cells = [cell for cell in book.cells if cell.id != TURN]
        if words:
            cells.append(nbformat.v4.new_markdown_cell(words, id=TURN))
        if cells != book.cells:
            book.cells = cells
            nbformat.write(book, path)
            changed.append(path)
    return changed


def your_turn(tutorial: str) -> str:
    """Return what a tutorial says about its exercises, in Markdown; "" if it has none."""
    lines = []
    for package in families():
        titles = [e.text.title for e in of_family(_family(package)) if e.exercise.after == tutorial]
        if titles:
            lines.append(f"- [{package.TITLE}](exercises/{_name(package)}.ipynb): {'; '.join(titles)}")
    if not lines:
        return ""
    words = "These exercises check themselves on real processes and say what is wrong:"
    return "\n".join(["## Your turn", "", words, "", *lines])


def notebook(package: ModuleType, kind: Kind, variant: str = "") -> Any:
    """Return one family's notebook of one kind; `variant` says whose numbers it has, "" those of everybody."""
    import nbformat

    cells = []
    for name, source, graded in _cells(package, kind, variant):
        markdown = not source.lstrip("\n") or name.endswith("-text")
        make = nbformat.v4.new_markdown_cell if markdown else nbformat.v4.new_code_cell
        cell = make(source.strip("\n"), id=name[:64])
        if graded is not None:
            cell.metadata["nbgrader"] = graded
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata: dict[str, Any] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    if variant:
        metadata[METADATA] = {"student": Variant.read(variant).student, "variant": variant}
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def _cells(package: ModuleType, kind: Kind, variant: str) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Yield the id, source and nbgrader metadata of each cell."""
    entries = of_family(_family(package), variant)
    title, _, text = (package.__doc__ or "").strip().partition("\n")
    contents = "\n".join(f"{i}. {entry.text.title}" for i, entry in enumerate(entries, 1))
    yield "start-text", f"# {title.rstrip('.')}\n\n{text.strip()}\n\n{WORDS[kind]}\n\n{contents}", None
    varied = variant and any(entry.varies for entry in entries)
    yield (
        "imports",
        IMPORTS + (f"\nVARIANT = {variant!r}  # whose numbers these are\n" if varied else ""),
        None,
    )
    if given := given_in(getsource(package)):
        yield "given", given, None
    for i, entry in enumerate(entries, 1):
        yield from _exercise(i, entry, kind)
    if kind != "nbgrader":
        yield "end-text", "## How far you are", None
        yield "progress", "mk.progress()", None


def _exercise(
    number: int, entry: ExerciseEntry, kind: Kind
) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    exercise, source = entry.exercise, entry.source
    graded = kind == "nbgrader"
    after = exercise.after if graded else f"[{exercise.after}]({UP[kind]}{exercise.after}.ipynb)"
    text = f"## {number}. {entry.text.title}\n\n{entry.text.task}\n\n*After {after}.*"
    broken = graded and source.has_instead
    if broken:
        text += f"\n\nThis is the cell to start from:\n\n```python\n{source.stub}```"
    yield f"{entry.name}-text", text, None
    if source.given:
        yield f"{entry.name}-given", source.given, None
    asks = exercise.predict if kind == "student" else ""
    if asks:
        yield f"{entry.name}-predict", f'mk.predict("{asks}")', None
    answer = {"student": source.stub, "solved": source.plain, "nbgrader": source.solution}[kind]
    if broken:  # nbgrader puts its own stub in place of what is between the markers
        answer = f"{BEGIN}\n{source.plain}\n\n{END}\n"  # two empty lines, as the formatter has them
    yield entry.name, answer, _nbgrader_metadata(entry.name, solution=True) if graded else None
    variant = ", variant=VARIANT" if entry.varies and entry.variant else ""
    check = f'mk.check("{entry.name}", {exercise.name_of_answer}{variant})'
    if kind == "solved":
        check += ".require()"
    if graded:  # by name, since `mk` is what the student has made of it
        apart = "from mpkit.course.grading.hidden_tests import require"
        required = f'require("{entry.name}", {exercise.name_of_answer})'
        check += f"\n{HIDDEN[0]}\n{apart}\n\n{required}\n{HIDDEN[1]}"
    points = exercise.points
    yield (
        f"{entry.name}-check",
        check,
        _nbgrader_metadata(f"{entry.name}-check", points=points) if graded else None,
    )
    if asks:
        yield f"{entry.name}-predicted", f'mk.predict("{asks}").against()', None


def _nbgrader_metadata(name: str, *, solution: bool = False, points: int = 0) -> dict[str, Any]:
    """Return a cell's metadata in nbgrader's schema 3."""
    metadata: dict[str, Any] = {
        "grade": bool(points),
        "grade_id": name,
        "locked": bool(points),
        "schema_version": 3,
        "solution": solution,
        "task": False,
    }
    return metadata | ({"points": points} if points else {})


def _family(package: ModuleType) -> str:
    return package.__name__.rsplit(".", 1)[1]


def _name(package: ModuleType) -> str:
    return f"{package.PLACE}-{_family(package).replace('_', '-')}"
