"""Reading a submitted notebook so that nothing in it can stop the grader.

It may not be a regular file, be endless, be no JSON, be JSON nested a hundred thousand levels deep, or have code that
cannot be parsed. Whatever it is, it affects its own grade only.
"""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpkit.common.size_limits import read_json

__all__ = [
    "LARGEST", "NoNotebook", "all_cells", "calls_in", "checks_in", "code_cells", "dicts", "read_file", "text_of",
]  # fmt: skip

LARGEST = 64 * 2**20
"""The most bytes of a notebook; those with many pictures have some ten million."""

LONGEST_CELL = 1_000_000
"""The most characters of a cell that is searched for checks."""


class NoNotebook(Exception):
    """A file cannot be read as a notebook; the message says why."""


def read_file(path: Path) -> bytes:
    """Return the bytes of a notebook's file.

    Raises:
        NoNotebook: The path is not a regular file, is a link, is too large, or may not be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        what = "a link: hand in the file itself" if path.is_symlink() else error.strerror or str(error)
        raise NoNotebook(what) from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
        os.close(handle)
        large = f"it has {status.st_size:,} bytes, of which {LARGEST:,} are read at most"
        raise NoNotebook(large if stat.S_ISREG(status.st_mode) else "it is no file")
    with os.fdopen(handle, "rb") as file:
        try:
            return file.read(LARGEST)
        except OSError as error:
            raise NoNotebook(error.strerror or str(error)) from None


def code_cells(data: bytes) -> list[str]:
    """Return the sources of a notebook's code cells.

    Raises:
        NoNotebook: The data are not a notebook.
    """
    sources = []
    for cell in all_cells(data):
        if cell.get("cell_type") == "code":
            source = cell.get("source", cell.get("input", ""))
            lines: list[Any] = source if isinstance(source, list) else [source]
            if not all(isinstance(line, str) for line in lines):
                raise NoNotebook("it has a cell whose source is no text")
            sources.append("".join(lines))
    return sources


def all_cells(data: bytes) -> list[dict[str, Any]]:
    """Return the cells of a notebook.

    Raises:
        NoNotebook: The data are not a notebook.
    """
    try:
        book = read_json(data.decode("utf-8-sig"))
    except ValueError as error:
        raise NoNotebook(f"{type(error).__name__}: {str(error)[:150]}") from None
    cells = _cells(book)
    if cells is None:
        raise NoNotebook("it has no list of cells")
    return dicts(cells)


def dicts(values: Any) -> list[dict[str, Any]]:
    """Return the dicts of a list; none of anything else."""
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def text_of(cell: dict[str, Any]) -> str:
    """Return the source of a cell, as far as it is text."""
    source = cell.get("source", cell.get("input", ""))
    lines = source if isinstance(source, list) else [source]
    return "".join(line for line in lines if isinstance(line, str))


def _cells(book: Any) -> list[Any] | None:
    """Return the cells of a notebook of format 4 or 3; None if it has no list of cells."""
    if isinstance(book, dict) and isinstance(sheets := book.get("worksheets"), list) and sheets:
        book = sheets[0]
    cells = book.get("cells") if isinstance(book, dict) else None
    return cells if isinstance(cells, list) else None


def checks_in(source: str) -> Iterator[tuple[str, ast.expr]]:
    r"""Yield the exercises that a cell checks, each with the expression of its answer.

    >>> [(name, ast.unparse(node)) for name, node in checks_in('mk.check("gpipe", gpipe)\nprint("check")')]
    [('gpipe', 'gpipe')]
    """
    for node in calls_in(source, "check"):
        name = node.args[0]
        if len(node.args) > 1 and isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value, node.args[1]


def calls_in(source: str, function: str) -> Iterator[ast.Call]:
    r"""Yield the calls of a function with at least one argument, as `function(...)` or `mk.function(...)`.

    >>> [ast.unparse(call) for call in calls_in('mk.predict("bubble", 0.2)', "predict")]
    ["mk.predict('bubble', 0.2)"]
    """
    if len(source) > LONGEST_CELL or function not in source:
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == function:
                yield node
