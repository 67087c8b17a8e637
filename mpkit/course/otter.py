"""The exercises as Otter's source notebooks: `otter assign` makes the students' notebook and the autograder from one.

For each exercise, between Otter's marks in raw cells:

    question   the text, and the code that is given
    solution   the student's cell, with the stub as its prompt
    check      mk.check, with its hints, as in every notebook
    tests      one hidden test that gives the exercise's points
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getsource
from pathlib import Path
from types import ModuleType
from typing import Any

from mpkit.course.catalogue import ExerciseEntry, families, of_family
from mpkit.course.framework.source import IMPORTS, given_in

__all__ = ["otter_notebook", "write_otter"]

CONFIG = """\
# ASSIGNMENT CONFIG
name: {name}
requirements:
- mpkit[notebook]
show_question_points: true
generate: true
export_cell: false
check_all_cell: false"""
WORDS = (
    "Write your answer in the cells that say so, and run the check below each: a wrong answer gets a hint, and a "
    "better one each time."
)


def write_otter(folder: Path) -> list[Path]:
    """Write a source notebook for each family to `otter/NAME/NAME.ipynb`, and return their paths."""
    import nbformat

    written = []
    for package in families():
        name = _name(package)
        target = folder / "otter" / name / f"{name}.ipynb"
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(otter_notebook(package), target)
        written.append(target)
    return written


def otter_notebook(package: ModuleType) -> Any:
    """Return one family's source notebook."""
    import nbformat

    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return nbformat.v4.new_notebook(cells=list(_cells(package)), metadata=metadata)


def _cells(package: ModuleType) -> Iterator[Any]:
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_raw_cell

    title, _, text = (package.__doc__ or "").strip().partition("\n")
    yield new_raw_cell(CONFIG.format(name=_name(package)), id="config")
    yield new_markdown_cell(f"# {title.rstrip('.')}\n\n{text.strip()}\n\n{WORDS}", id="start-text")
    yield new_code_cell(IMPORTS.strip(), id="imports")
    if given := given_in(getsource(package)):
        yield new_code_cell(given, id="given")
    for entry in of_family(_name(package).partition("-")[2].replace("-", "_")):
        yield from _question(entry)


def _question(entry: ExerciseEntry) -> Iterator[Any]:
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_output, new_raw_cell

    source, name, answer = entry.source, entry.name, entry.exercise.name_of_answer

    def raw(text: str, what: str) -> Any:
        return new_raw_cell(f"# {text}", id=f"{name[:50]}-{what}")

    # ---- question
    about = f"BEGIN QUESTION\nname: {name}\npoints: {entry.exercise.points}\ncheck_cell: false"
    yield raw(about, "begin")
    yield new_markdown_cell(f"## {entry.text.title}\n\n{entry.text.task}", id=f"{name[:50]}-text")
    if source.given:
        yield new_code_cell(source.given, id=f"{name[:50]}-given")
    # ---- solution
    yield raw("BEGIN SOLUTION", "answer-begin")
    solution = f"# BEGIN SOLUTION NO PROMPT\n{source.plain}\n# END SOLUTION\n"
    prompt = f"''' # BEGIN PROMPT\n{source.stub}\n''' # END PROMPT"
    yield new_code_cell(solution + prompt, id=name[:64])
    yield raw("END SOLUTION", "answer-end")
    # ---- check
    check = f'mk.check("{name}", {answer})'
    # ---- tests
    yield raw("BEGIN TESTS", "tests-begin")
    said = new_output("execute_result", {"text/plain": "True"}, execution_count=1)
    hidden = f'from mpkit.course.grading.hidden_tests import require\n\nrequire("{name}", {answer})'
    yield new_code_cell(f"# HIDDEN\n{hidden}", id=f"{name[:50]}-test", outputs=[said])
    yield raw("END TESTS", "tests-end")
    yield raw("END QUESTION", "end")
    yield new_code_cell(check, id=f"{name[:50]}-check")


def _name(package: ModuleType) -> str:
    return f"{package.PLACE}-{package.__name__.rpartition('.')[2].replace('_', '-')}"
