"""The exercises' notebooks, written from their files: for students, solved, and for nbgrader.

    student    the text, the given code, a stub, and the check
    solved     the solution in place of the stub; the check has to pass
    nbgrader   a source notebook: solutions and hidden tests between nbgrader's markers, and its metadata

Each family has one notebook of each kind. The notebooks depend on the exercises only, so that a test can compare them.
Each tutorial gets a last cell with links to the exercises that it prepares for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from mpkit.classroom.catalogue import Entry, families, of_family
from mpkit.classroom.framework.source import BEGIN, END, IMPORTS, given_in

__all__ = ["Kind", "link_tutorials", "notebook", "notebooks", "write_notebooks", "your_turn"]

Kind = Literal["student", "solved", "nbgrader"]
HIDDEN = ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")
WORDS = {
    "student": "Run the first cell. Then write your answer into the cells that say so, and run the check below each: a "
    "wrong answer gets a hint, and a better one each time.",
    "solved": "The solutions. Look at them once yours passes, or does not for too long.",
    "nbgrader": "Write your answer into the cells that say so, and run the check below each.",
}
TURN = "your-turn"
"""The id of the tutorials' last cell."""
UP = {"student": "../", "solved": "../../"}
"""The path from the notebook's folder to the tutorials."""


def write_notebooks(folder: Path) -> list[Path]:
    """Write all notebooks below a folder, and return their paths.

    Student notebooks lie in the folder itself, solved ones in `solved/`, nbgrader's in `nbgrader/source/`.
    """
    import nbformat

    written = []
    for path, book in notebooks():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(book, target)
        written.append(target)
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
        titles = [e.source.title for e in of_family(_family(package)) if e.exercise.after == tutorial]
        if titles:
            lines.append(f"- [{package.TITLE}](exercises/{_name(package)}.ipynb): {'; '.join(titles)}")
    if not lines:
        return ""
    words = "Exercises that check themselves, on real processes, and say what is wrong:"
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
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def _cells(package: ModuleType, kind: Kind) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Yield the id, source and nbgrader metadata of each cell."""
    entries = of_family(_family(package))
    title, _, text = (package.__doc__ or "").strip().partition("\n")
    contents = "\n".join(f"{i}. {entry.source.title}" for i, entry in enumerate(entries, 1))
    yield "start-text", f"# {title.rstrip('.')}\n\n{text.strip()}\n\n{WORDS[kind]}\n\n{contents}", None
    yield "imports", IMPORTS, None
    if given := given_in(package):
        yield "given", given, None
    for i, entry in enumerate(entries, 1):
        yield from _exercise(i, entry, kind)
    if kind != "nbgrader":
        yield "end-text", "## How far you are", None
        yield "progress", "mk.progress()", None


def _exercise(number: int, entry: Entry, kind: Kind) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    exercise, source = entry.exercise, entry.source
    graded = kind == "nbgrader"
    after = exercise.after if graded else f"[{exercise.after}]({UP[kind]}{exercise.after}.ipynb)"
    text = f"## {number}. {source.title}\n\n{source.text}\n\n*After {after}.*"
    broken = graded and source.has_instead
    if broken:
        text += f"\n\nThis is the cell to start from:\n\n```python\n{source.stub}```"
    yield f"{entry.name}-text", text, None
    if source.given:
        yield f"{entry.name}-given", source.given, None
    answer = {"student": source.stub, "solved": source.plain, "nbgrader": source.solution}[kind]
    if broken:  # nbgrader puts its own stub in place of what is between the markers
        answer = f"{BEGIN}\n{source.plain}\n\n{END}\n"  # two empty lines, as the formatter has them
    yield entry.name, answer, _graded(entry.name, solution=True) if graded else None
    check = f'mk.check("{entry.name}", {exercise.name_of_answer})'
    if kind == "solved":
        check += ".require()"
    if graded:
        check += f"\n{HIDDEN[0]}\n{check}.require()\n{HIDDEN[1]}"
    points = exercise.points
    yield f"{entry.name}-check", check, _graded(f"{entry.name}-check", points=points) if graded else None


def _graded(name: str, *, solution: bool = False, points: int = 0) -> dict[str, Any]:
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
