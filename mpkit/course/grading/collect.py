"""Running a student's notebook in a process of its own, and packing its answers as soon as they are defined.

    python -m mpkit.course.grading.collect CELLS OUT MEMORY EXERCISE=NAME...

    limit    limit the memory of this process and the size of files
    run      run cell after cell, as Jupyter would; a cell that fails does not keep the next one from running
    pack     pack the answers checked in a cell right after it, and at the end all that are missing, by their names

Packed answers are written to OUT at once, so that they stay whatever a later cell does to this process.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import mpkit
from mpkit.course.framework.room import PackedAnswer, limit_memory
from mpkit.course.grading.submissions import checks_in

LARGEST_FILE = 64 * 2**20
STARTED = "started"
"""The file that marks the end of the imports; from then on the notebook's time counts."""

ENDED = "ended"
"""The file that marks that the last cell has run."""


def main(cells: str, out: str, memory: str, *exercises: str) -> None:
    """Run a notebook and pack its answers, as the module's docstring describes."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    # ---- limit
    limit_memory(int(memory))
    _limit_files()
    # ---- run
    sources = json.loads(Path(cells).read_text(encoding="utf-8"))
    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    # Answers are judged later, elsewhere; here is no solution.
    for asked in (
        "check",
        "beside_serial",
        "progress",
    ):
        setattr(mpkit, asked, lambda *_, **__: None)
    Path(out, STARTED).touch()
    wanted: dict[str, ast.expr] = {
        name: ast.Name(answer, ast.Load()) for name, _, answer in (each.partition("=") for each in exercises)
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
                elif name in wanted:  # a later cell may define its answer
                    wanted[name] = node
        for name, node in wanted.items():
            _pack(name, node, shell.user_ns, Path(out))
    Path(out, ENDED).touch()


def _plain_python(shell: Any, source: str) -> str:
    """Return a cell's source with magics turned into Python; "" if it cannot be parsed."""
    try:
        return str(shell.transform_cell(source))
    except (SyntaxError, RecursionError, MemoryError):
        return ""


def _pack(name: str, node: ast.expr, space: dict[str, Any], out: Path) -> bool:
    """Write one answer to a file if it can be packed, else the reason why not; return whether it was packed."""
    if not name.replace("-", "").isalnum() or len(name) > 100:  # the name becomes part of a file name
        return False
    try:
        expression = ast.fix_missing_locations(ast.Expression(node))
        value = eval(compile(expression, "<answer>", "eval"), space)
        packed = PackedAnswer.pack(value)
    except Exception as error:  # whatever a student's object raises, it is no answer
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
