"""In a process of its own: run a student's notebook, and pack its answers as they come.

    python -m mpkit.classroom.grading.collect NOTEBOOK OUT MEMORY

    limit    memory of this process, the size of files
    run      cell after cell, as Jupyter would; one that fails does not keep the next from running
    pack     after each cell the answers of the checks in it, and at the end what was never checked, by its name

What is packed lies in OUT at once: whatever a later cell does to this process, that stays.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mpkit
from mpkit.classroom.catalogue import find
from mpkit.classroom.room import Answer, limit_memory

__all__ = ["checks_in", "main"]

LARGEST_FILE = 64 * 2**20


def main(notebook: str, out: str, memory: str) -> None:
    """Run it; see above."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    # ---- limit
    limit_memory(int(memory))
    _limit_files()
    # ---- run
    cells = code_cells(Path(notebook))
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    mpkit.check = lambda name, answer, **_: None  # type: ignore[assignment]  # it is judged later, elsewhere
    packed: set[str] = set()
    with Path(out, "cells.jsonl").open("a", encoding="utf-8") as log:
        for number, source in enumerate(cells):
            result = shell.run_cell(source, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                said = {"cell": number + 1, "error": f"{type(error).__name__}: {error}"[:500]}
                log.write(json.dumps(said) + "\n")
                log.flush()
            # ---- pack
            for name, node in checks_in(shell.transform_cell(source)):
                _pack(name, node, shell.user_ns, Path(out))
                packed.add(name)
        for name in sys.argv[4:]:
            if name not in packed:
                _pack(
                    name, ast.Name(find(name).exercise.name_of_answer, ast.Load()), shell.user_ns, Path(out)
                )


def code_cells(path: Path) -> list[str]:
    """The sources of its code cells."""
    import nbformat

    book = nbformat.read(path, as_version=4)
    return [cell.source for cell in book.cells if cell.cell_type == "code"]


def checks_in(source: str) -> Iterator[tuple[str, ast.expr]]:
    r"""The exercises that a cell checks, each with the expression that it hands in.

    >>> [(name, ast.unparse(node)) for name, node in checks_in('mk.check("gpipe", gpipe)\nprint("check")')]
    [('gpipe', 'gpipe')]
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) < 2 or not isinstance(node.args[0], ast.Constant):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "check" and isinstance(node.args[0].value, str):
            yield node.args[0].value, node.args[1]


def _pack(name: str, node: ast.expr, space: dict[str, Any], out: Path) -> None:
    """Write one answer, if there is one that can be sent."""
    if not name.replace("-", "").isalnum():  # it becomes a file's name
        return
    try:
        expression = ast.fix_missing_locations(ast.Expression(node))
        value = eval(compile(expression, "<answer>", "eval"), space)
        packed = Answer.of(value)
    except Exception:  # whatever a student's object does: it is no answer
        return
    (out / f"{name}.partial").write_bytes(packed.packed)
    (out / f"{name}.partial").replace(out / f"{name}.answer")


def _limit_files() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(*sys.argv[1:4])
