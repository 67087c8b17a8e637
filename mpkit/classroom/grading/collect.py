"""In a process of its own: run a student's notebook, and pack its answers as they come.

    python -m mpkit.classroom.grading.collect CELLS OUT MEMORY EXERCISES...

    limit    memory of this process, the size of files
    run      cell after cell, as Jupyter would; one that fails does not keep the next from running
    pack     after each cell the answers of the checks in it, and at the end what was not there yet, by its name

What is packed lies in OUT at once: whatever a later cell does to this process, that stays.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import mpkit
from mpkit.classroom.catalogue import find
from mpkit.classroom.grading.reading import checks_in
from mpkit.classroom.room import Answer, limit_memory

__all__ = ["ENDED", "STARTED", "main"]

LARGEST_FILE = 64 * 2**20
STARTED = "started"
"""The file that says that all is imported: from here on the notebook's time counts."""

ENDED = "ended"
"""The file that says that the last cell has run."""


def main(cells: str, out: str, memory: str, *exercises: str) -> None:
    """Run it; see above."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    # ---- limit
    limit_memory(int(memory))
    _limit_files()
    # ---- run
    sources = json.loads(Path(cells).read_text(encoding="utf-8"))
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    mpkit.check = lambda name, answer, **_: None  # type: ignore[assignment]  # it is judged later, elsewhere
    Path(out, STARTED).touch()
    wanted: dict[str, ast.expr] = {
        name: ast.Name(find(name).exercise.name_of_answer, ast.Load()) for name in exercises
    }
    with Path(out, "cells.jsonl").open("a", encoding="utf-8") as log:
        for number, source in enumerate(sources):
            result = shell.run_cell(source, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                said = {"cell": number + 1, "error": f"{type(error).__name__}: {error}"[:500]}
                log.write(json.dumps(said) + "\n")
                log.flush()
            # ---- pack
            for name, node in checks_in(_plain_python(shell, source)):
                if _pack(name, node, shell.user_ns, Path(out)):
                    wanted.pop(name, None)
                elif name in wanted:  # its answer may come in a later cell
                    wanted[name] = node
        for name, node in wanted.items():
            _pack(name, node, shell.user_ns, Path(out))
    Path(out, ENDED).touch()


def _plain_python(shell: Any, source: str) -> str:
    """A cell without magic; of one that no parser takes nothing."""
    try:
        return str(shell.transform_cell(source))
    except (SyntaxError, RecursionError, MemoryError):
        return ""


def _pack(name: str, node: ast.expr, space: dict[str, Any], out: Path) -> bool:
    """Write one answer, if there is one that can be sent; else why not."""
    if not name.replace("-", "").isalnum() or len(name) > 100:  # it becomes a file's name
        return False
    try:
        expression = ast.fix_missing_locations(ast.Expression(node))
        value = eval(compile(expression, "<answer>", "eval"), space)
        packed = Answer.of(value)
    except Exception as error:  # whatever a student's object does: it is no answer
        (out / f"{name}.why").write_text(f"{type(error).__name__}: {error}"[:300], encoding="utf-8")
        return False
    (out / f"{name}.partial").write_bytes(packed.packed)
    (out / f"{name}.partial").replace(out / f"{name}.answer")
    return True


def _limit_files() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
