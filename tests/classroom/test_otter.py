"""Otter's own programs read the notebooks that are written for them. It is no dependency: see conftest.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from mpkit.course.catalogue import families, find, of_family
from mpkit.course.otter import write_otter

RANKS = ("which-rank-am-i", "pass-the-token", "which-collective")


def otter(*command: str, at: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "otter", *command], cwd=at, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(600)
def test_otter_makes_and_grades_an_assignment(tmp_path: Path) -> None:
    written = {path.stem: path for path in write_otter(tmp_path)}
    assert len(written) == len(families())
    otter("assign", "--no-run-tests", str(written["1-ranks"]), "dist", at=tmp_path)
    handed_out = tmp_path / "dist" / "student" / "1-ranks.ipynb"
    autograder = next((tmp_path / "dist" / "autograder").glob("*.zip"))
    # ---- what students get: stubs, checks, and no solution
    book = nbformat.read(handed_out, as_version=4)
    sources = [cell.source for cell in book.cells]
    for entry in of_family("ranks"):
        assert entry.source.stub.strip() in [source.strip() for source in sources]
        assert not any(entry.source.plain.strip() in source for source in sources)
        assert f'mk.check("{entry.name}", {entry.exercise.name_of_answer})' in sources
    # ---- three of five solved
    for cell in book.cells:
        for name in RANKS:
            if cell.source.strip() == find(name).source.stub.strip():
                cell.source = find(name).source.plain
    nbformat.write(book, tmp_path / "ada.ipynb")
    otter("run", "-a", str(autograder), "-o", str(tmp_path), "ada.ipynb", at=tmp_path)
    tests = json.loads((tmp_path / "results.json").read_text())["tests"]
    points = {test["name"]: test["score"] for test in tests if test.get("max_score")}
    asked = {entry.name: 10 * (entry.name in RANKS) for entry in of_family("ranks")}
    assert {name: points[name] for name in asked} == asked
