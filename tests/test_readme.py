"""The code of the README runs as it stands there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.limits import PROGRAM

README = Path(__file__).parent.parent / "README.md"
ACCURACY = README.parent / "docs" / "accuracy.md"


@pytest.mark.soak
def test_the_code_runs(tmp_path: Path) -> None:
    program = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    (tmp_path / "readme.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "readme.py"], cwd=tmp_path, text=True, capture_output=True, timeout=PROGRAM
    )
    assert done.returncode == 0, done.stderr
    assert "bubble" in done.stdout


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
