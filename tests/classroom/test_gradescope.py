"""Grades as Gradescope reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpkit.course.catalogue import find
from mpkit.course.framework.exercise import CheckRow
from mpkit.course.grading.grade_file import Grade
from mpkit.course.grading.gradescope import results, write_gradescope
from mpkit.course.grading.handed_in import HandedIn
from mpkit.course.judge import Checked

ENTRIES = (find("gpipe"), find("pass-the-token"))
OF_A_TEST = {"name", "score", "max_score", "status", "output", "output_format", "visibility"}
"""All of these are in Gradescope's specification of results.json."""


def grade(student: str, right: tuple[bool | None, ...], name: str = "hw.ipynb", **more: object) -> Grade:
    each = HandedIn(student, f"{student}/{name}", ENTRIES, questions=("bubble",))
    checked = {
        entry.name: Checked(entry.name, entry.text.title, (CheckRow("all", "1", "1", ok),), ok, hint="think")
        if ok is not None
        else None
        for entry, ok in zip(ENTRIES, right, strict=True)
    }
    return Grade(each, checked, **more)  # type: ignore[arg-type]


def test_the_sum_of_its_tests_is_the_grade() -> None:
    one = grade("ada", (True, False), notes=["cell 3: \x1b[2J"], predictions={"bubble": 0.27})
    said = json.loads(json.dumps(results([one])))
    assert sum(test["score"] for test in said["tests"]) == one.total == 12
    assert sum(test["max_score"] for test in said["tests"]) == one.most == 22
    assert all(set(test) == OF_A_TEST for test in said["tests"])
    assert [test["status"] for test in said["tests"]] == ["passed", "failed", "passed"]
    assert "Hint: think" in said["tests"][1]["output"]
    assert said["output"] == "cell 3: \\x1b[2J"


def test_of_two_notebooks_the_best_answer_counts() -> None:
    said = results([grade("ada", (True, None)), grade("ada", (False, None), "again.ipynb")])
    assert [test["score"] for test in said["tests"]] == [10, 0, 0]
    assert "no answer was found" in said["tests"][1]["output"]


def test_a_file_is_one_students_and_a_folder_the_class(tmp_path: Path) -> None:
    grades = [grade("Kim Lee", (True, True)), grade("Kim_Lee", (None, None))]
    (one,) = write_gradescope(tmp_path / "results" / "results.json", grades[:1])
    assert json.loads(one.read_text())["tests"][0]["score"] == 10
    written = write_gradescope(tmp_path / "class", grades)
    assert len(set(written)) == 2 and all(path.suffix == ".json" for path in written)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"a folder is asked for, or a file that ends in .json"):
        write_gradescope(tmp_path / "file", grades)
