"""The code of the README runs as it stands there."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
ACCURACY = README.parent / "docs" / "accuracy.md"


def test_every_file_that_it_names_is_there() -> None:
    text = README.read_text()
    for name in re.findall(r"\]\((?!http)([^)#]+)\)|`((?:docs|notebooks|benchmarks|mpkit)/[\w./-]*)`", text):
        path = next(part for part in name if part)
        if path != "benchmarks/results.json":  # made by make bench
            assert (README.parent / path).exists(), path


def test_the_page_on_accuracy_names_every_constant_that_was_fitted() -> None:
    """A constant whose docstring says so is in the page's table, by its name."""
    text, named = ACCURACY.read_text(encoding="utf-8"), set()
    for folder in ("prediction/cost_model", "devices"):
        for path in (README.parent / "mpkit" / folder).rglob("*.py"):
            body = ast.parse(path.read_text(encoding="utf-8")).body
            for assigned, said in pairwise(body):
                if (
                    isinstance(assigned, ast.Assign)
                    and isinstance(said, ast.Expr)
                    and "fitted" in ast.unparse(said)
                ):
                    names = [each.id for each in ast.walk(assigned.targets[0]) if isinstance(each, ast.Name)]
                    assert any(f"`{name}" in text for name in names), (path.name, names)
                    named.update(names)
    assert {"KAPPA", "ASYNC", "TILE", "RAMP", "EFA", "CONVERTED"} <= named
