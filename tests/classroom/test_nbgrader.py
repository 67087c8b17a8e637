"""nbgrader makes an assignment of our sources, and grades it."""

import csv
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest

from mpkit.course.notebooks import write_notebooks

NBGRADER = str(getattr(find_spec("nbgrader"), "origin", ""))  # not imported: SQLAlchemy warns of its tables
NAME = "1-ranks"


def run(course: Path, *words: str) -> None:
    """A command of nbgrader's; its database tool is beside its package or beside Python."""
    beside = [str(Path(NBGRADER).parents[1] / "bin"), str(Path(sys.executable).parent)]
    path = os.pathsep.join([*beside, os.environ.get("PATH", "")])
    home = {"PATH": path, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "nbgrader", *words]
    done = subprocess.run(command, cwd=course, env=os.environ | home, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(400)
def test_it_generates_and_grades(tmp_path: Path) -> None:
    """With the configuration that ships: its stub is one that a check knows."""
    write_notebooks(tmp_path / "all")
    course = tmp_path / "all" / "nbgrader"
    shutil.copytree(course / "source" / NAME, tmp_path / "source" / NAME)
    shutil.copy(course / "nbgrader_config.py", tmp_path)
    run(tmp_path, "generate_assignment", NAME, "--create")
    released = tmp_path / "release" / NAME / f"{NAME}.ipynb"
    text = "\n".join(cell.source for cell in nbformat.read(released, as_version=4).cells)
    assert 'raise NotImplementedError("your turn")' in text and "YOUR CODE HERE" not in text
    assert "BEGIN SOLUTION" not in text and "require(" not in text
    for student, book in (("ada", tmp_path / "source" / NAME / f"{NAME}.ipynb"), ("bob", released)):
        handed_in = tmp_path / "submitted" / student / NAME
        handed_in.mkdir(parents=True)
        shutil.copy(book, handed_in)
    run(tmp_path, "autograde", NAME, "--create")
    run(tmp_path, "export")
    with (tmp_path / "grades.csv").open(newline="") as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    assert float(rows["ada"]["raw_score"]) == float(rows["ada"]["max_score"]) > 0
    assert float(rows["bob"]["raw_score"]) == 0
    graded = nbformat.read(tmp_path / "autograded" / "bob" / NAME / f"{NAME}.ipynb", as_version=4)
    check = next(cell for cell in graded.cells if cell.id == "pass-the-token-check")
    assert "Hint: " in str(check.outputs), "the stub gets its first hint"
