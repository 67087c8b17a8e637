"""An exercise's two files without all that tells its solution.

text       of the text file is left the title and the task
answer     the cell that students get stands in place of the solution
exercise   of `EXERCISE` is left what runs an answer and names it: no budgets, right values, recognized mistakes
checks     of the code below `# %% checks` is left what that needs, and what the text's placeholders stand for
imports    and of the imports what the rest needs
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from types import ModuleType

from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.exercise_text import PLACEHOLDER
from mpkit.course.framework.on_ranks import OnRanks
from mpkit.course.framework.questions import Questions
from mpkit.course.framework.schedules import Schedules

__all__ = ["sealed", "sealed_text"]

KINDS = (OnRanks, Questions, Schedules)
KEPT = ("solution", "called", "cases", "play", "also", "after", "place", "points")
"""What is kept of an exercise: it runs an answer, and says nothing of what is right."""
SEALED = {"result": '"the result"'}
"""What stands in place of the rest, where the kind asks for it."""
RIGHT = {OnRanks: "expected", Questions: "truth"}
"""The function that knows what is right."""


def sealed(entry: ExerciseEntry, module: ModuleType, code: str) -> str:
    """Return the code of an exercise's Python file without its solution."""
    head, _, rest = code.partition("# %% answer\n")
    _, _, checks = rest.partition("# %% checks\n")
    # ---- answer
    answer = entry.source.stub
    # ---- exercise
    exercise = _exercise(entry, checks)
    # ---- checks
    placeholders = {match[1] for match in re.finditer(PLACEHOLDER, sealed_text(entry))}
    tables = {name for name in ("VARIES",) if hasattr(module, name)}
    named = _loaded(ast.parse(exercise)) | placeholders | tables
    kept = _needed(checks, named)
    # ---- imports
    text = f"{_head(head)}# %% answer\n{answer}\n\n# %% checks\n{kept}\n\n{exercise}"
    return _imported(text)


def sealed_text(entry: ExerciseEntry) -> str:
    """Return the text file without what follows the task: hints and wrong answers."""
    return entry.text_path.read_text(encoding="utf-8").partition("\n## ")[0]


def _exercise(entry: ExerciseEntry, checks: str) -> str:
    """Return the assignment of EXERCISE, with what is kept of it."""
    made = next(
        node.value
        for node in ast.parse(checks).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXERCISE"
    )
    assert isinstance(made, ast.Call)
    kind = next(kind for kind in KINDS if isinstance(entry.exercise, kind))
    given = {str(each.arg): ast.unparse(each.value) for each in made.keywords}
    left = {name: value for name, value in given.items() if name in KEPT}
    left |= {name: value for name, value in SEALED.items() if name in given}
    if kind in RIGHT:
        left[RIGHT[kind]] = "raise_missing"
    words = "".join(f"    {name}={value},\n" for name, value in left.items())
    return f"EXERCISE = {kind.__name__}(\n{words})\n"


def _needed(checks: str, names: set[str]) -> str:
    """Return the definitions that these names need, in their order."""
    body = [node for node in ast.parse(checks).body if ast.unparse(node).partition(" ")[0] != "EXERCISE"]
    kept: list[ast.stmt] = []
    while more := [node for node in body if node not in kept and _defined(node) & names]:
        kept += more
        for node in more:
            names |= _loaded(node)
    lines = checks.splitlines()
    parts = []
    for node in sorted(kept, key=lambda node: node.lineno):
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(parts) + "\n"


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {
        each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


def _loaded(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _head(head: str) -> str:
    """Return the docstring, the imports and the given code; with what the sealed exercise imports."""
    more = [
        "from mpkit.course.no_solutions import raise_missing",
        *(f"from {kind.__module__} import {kind.__name__}" for kind in KINDS),
    ]
    mark = "from __future__ import annotations\n"
    assert mark in head
    return head.replace(mark, mark + "\n" + "\n".join(more) + "\n", 1)


def _imported(text: str) -> str:
    """Return a file without the imports of names that it does not use, and without repeated ones."""
    tree, lines = ast.parse(text), text.splitlines()
    used = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    seen: set[str] = set()
    drop: set[int] = set()
    put: dict[int, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "module", "") == "__future__":
            continue
        names = [each for each in node.names if _name(each) in used - seen]
        seen |= {_name(each) for each in names}
        drop |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if names:
            node.names = names
            put[node.lineno] = ast.unparse(node)
    return "\n".join(_lines(lines, drop, put)) + "\n"


def _lines(lines: list[str], drop: set[int], put: dict[int, str]) -> Iterable[str]:
    for number, line in enumerate(lines, 1):
        if number in put:
            yield put[number]
        elif number not in drop:
            yield line


def _name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]
