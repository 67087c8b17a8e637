"""Count lines and files of Python by room: `python -m scripts.count_lines`.

lines        all lines of a file
code         lines that hold code: no docstring, comment or blank line
docstrings   lines of docstrings
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("mpkit", "tests", "scripts", "benchmarks", "examples")
SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def count(text: str) -> tuple[int, int, int]:
    r"""Return how many lines a module has, how many of them hold code, and how many are docstrings'.

    >>> count('"A module."\n\nx = 1  # one\n')
    (3, 1, 1)
    """
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    return text.count("\n"), len(code - docstrings), len(docstrings)


def main() -> None:
    """Print the table."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            rooms = {folder, "/".join(parts[:2]) if folder == "mpkit" and len(parts) > 2 else folder}
            for room in rooms:
                figures = (1, *count(path.read_text(encoding="utf-8")))
                rows[room] = [total + each for total, each in zip(rows[room], figures, strict=True)]
    print(f"{'room':20}{'files':>8}{'lines':>9}{'code':>9}{'docstrings':>12}")
    for room, (files, lines, code, docstrings) in sorted(rows.items()):
        print(f"{room:20}{files:8,}{lines:9,}{code:9,}{docstrings:12,}")


if __name__ == "__main__":
    main()
