"""The exercises' notebooks, written from their files: for students, solved, and for nbgrader.

    student    the text, the given code, a stub, and the check
    solved     the solution in place of the stub; the check has to pass
    nbgrader   a source notebook: solutions and hidden tests between nbgrader's markers, and its metadata

Each family has one notebook of each kind. The notebooks depend on the exercises only, so that a test can compare them;
the repository has the students' notebooks, and `mpkit exercises` writes all. Each tutorial gets a last cell with links
to the exercises that it prepares for.
"""

import functools
import tomllib
from collections.abc import Iterator
from inspect import getsource
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from mpkit.course.catalogue import ExerciseEntry, families, of_family
from mpkit.course.framework.source import BEGIN, END, IMPORTS, given_in

Kind = Literal["student", "solved", "nbgrader"]
HIDDEN = ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")
TURN = "your-turn"
"""The id of the tutorials' last cell."""
UP = {"student": "../", "solved": "../../"}
"""The path from the notebook's folder to the tutorials."""


@functools.cache
def _texts() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("notebooks.toml").read_text("utf-8"))


def write_notebooks(folder: Path) -> list[Path]:
    """Write all notebooks below a folder, and return their paths.

    Student notebooks lie in the folder itself, solved ones in `solved/`, nbgrader's in `nbgrader/source/`, below its
    configuration.
    """
    import nbformat

    written = []
    for path, book in notebooks():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(book, target)
        written.append(target)
    written.append(folder / "nbgrader" / "nbgrader_config.py")
    written[-1].write_text(_texts()["nbgrader"]["config"], encoding="utf-8")
    return written


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


def notebook(package: ModuleType, kind: Kind) -> Any:
    """Return one family's notebook of one kind."""
    import nbformat

    cells = []
    for name, source, graded in _cells(package, kind):
        markdown = not source.lstrip("\n") or name.endswith("-text")
        make = nbformat.v4.new_markdown_cell if markdown else nbformat.v4.new_code_cell
        cell = make(source.strip("\n"), id=name[:64])
        if graded is not None:
            cell.metadata["nbgrader"] = graded
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(
        cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}}
    )


def _cells(package: ModuleType, kind: Kind) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Yield the id, source and nbgrader metadata of each cell."""
    entries = of_family(_family(package))
    title, _, text = (package.__doc__ or "").strip().partition("\n")
    contents = "\n".join(f"{i}. {entry.text.title}" for i, entry in enumerate(entries, 1))
    yield (
        "start-text",
        f"# {title.rstrip('.')}\n\n{text.strip()}\n\n{_texts()['words'][kind]}\n\n{contents}",
        None,
    )
    yield "imports", IMPORTS, None
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
    yield entry.name, answer, _nbgrader_metadata(entry.name) if graded else None
    check = f'mk.check("{entry.name}", {exercise.name_of_answer})'
    if kind == "solved":
        check += ".require()"
    if graded:  # by name, since `mk` is what the student has made of it
        apart = "from mpkit.course.grading.hidden_tests import require"
        required = f'require("{entry.name}", {exercise.name_of_answer})'
        check += f"\n{HIDDEN[0]}\n{apart}\n\n{required}\n{HIDDEN[1]}"
    name = f"{entry.name}-check"
    yield name, check, _nbgrader_metadata(name, exercise.points) if graded else None
    if asks:
        yield f"{entry.name}-predicted", f'mk.predict("{asks}").against()', None


def _nbgrader_metadata(name: str, points: int = 0) -> dict[str, Any]:
    """Return the metadata of a cell that is graded, or of an answer's cell, in nbgrader's schema 3."""
    graded = bool(points)
    metadata = {"grade": graded, "grade_id": name, "locked": graded, "schema_version": 3, "task": False}
    return metadata | ({"solution": False, "points": points} if graded else {"solution": True})


def _family(package: ModuleType) -> str:
    return package.__name__.rsplit(".", 1)[1]


def _name(package: ModuleType) -> str:
    return f"{package.PLACE}-{_family(package).replace('_', '-')}"
