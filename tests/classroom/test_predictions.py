"""Predictions: the first number counts, what was shown counts no more, and what is mistyped is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mpkit as mk
from mpkit.course.grading.grades import Grade
from mpkit.course.grading.report import GradeReport
from mpkit.course.grading.submissions import handed_in
from mpkit.course.predictions.predict import PREDICTED, box
from mpkit.course.predictions.questions import QUESTIONS, question
from mpkit.course.progress import FILE, Progress, StudentPrediction
from mpkit.views.theme import STATUS


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_first_number_counts() -> None:
    assert mk.predict("bubble").value is None
    assert mk.predict("bubble", 0.25).value == 0.25
    again = mk.predict("bubble", "30 %")
    assert again.value == 0.25 and "25.0 % was locked in first, and stays" in str(again)
    compared = again.against(0.323)
    assert compared.gap == pytest.approx(0.25 - 3 / 11)
    assert Progress.read().predictions == {"bubble": StudentPrediction(0.25, 0.323)}


@pytest.mark.parametrize(
    "value, words, points", [("3/11", "just right", 2), ("32.3 %", "5.0 percentage points too high", 1)]
)
def test_theory_judges_in_words_in_colour_and_in_points(value: str, words: str, points: int) -> None:
    """A measurement is told beside it: words spoke of the measurement once, and colour and points of theory."""
    guess = mk.predict("bubble", 3 / 11 if value == "3/11" else value)
    compared = guess.against(0.323)
    said = str(compared).splitlines()[0]
    assert f"theory says 27.3 %: {words}. Measured here: 32.3 %." in said
    assert (STATUS["good"] in compared._repr_mimebundle_()["text/html"]) == (points == 2)
    assert 1 + question("bubble").close(guess.value or 0) == points


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda one: one.name)
def test_a_question_is_whole(asked: Any) -> None:
    truth = asked.truth()
    assert asked.close(truth) and not asked.close(2 * truth)
    assert asked.gap(truth, truth) == "just right"
    assert asked.text.endswith("?") and asked.why.endswith(".")


def test_the_box_locks_a_number_in() -> None:
    prediction = mk.predict("bubble")
    whole = box(prediction)
    text, button = whole.children[1].children
    said = whole.children[2]
    button.click()
    assert "Type a number first" in said.value
    text.value = "<27>"
    button.click()
    assert "&lt;27&gt;" in said.value and not button.disabled
    text.value = "27 %"
    button.click()
    assert "Locked in: 27.0 %" in said.value and button.disabled and text.disabled
    assert mk.predict("bubble").value == 0.27
    shown = mk.predict("bubble")._repr_mimebundle_()
    assert shown[PREDICTED] == {"name": "bubble", "value": 0.27}


def test_the_gap_is_part_of_the_grade(tmp_path: Path) -> None:
    """From the file of progress first, then the outputs; what a call says when it is graded comes last."""
    folder = tmp_path / "class"
    cell = {"cell_type": "code", "source": 'mk.predict("bubble")', "outputs": [{"data": {PREDICTED: 0}}]}
    shown = [{"data": {PREDICTED: {"name": "bubble", "value": 0.27}}}, {"data": 3}, 4]
    for name, outputs in (("ada", shown), ("eve", []), ("kim", shown)):
        (folder / name).mkdir(parents=True)
        cells = [cell, cell | {"source": 'mk.check("gpipe", gpipe)', "outputs": outputs}]
        (folder / name / "hw.ipynb").write_text(json.dumps({"cells": cells}))
    kept = {"version": 1, "exercises": {"gpipe": {"tries": 3}}, "predictions": {"bubble": {"value": 0.5}}}
    (folder / "kim" / FILE).write_text(json.dumps(kept))
    ada, eve, kim = handed_in(folder, ("gpipe",))
    assert (ada.predicted, eve.predicted, kim.predicted) == ({"bubble": 0.27}, {}, {"bubble": 0.5})
    assert (ada.tries, kim.tries) == ({}, {"gpipe": 3})
    report = GradeReport([ada, eve, kim], tmp_path / "grades.csv", tmp_path / "pages")
    for each in (ada, eve, kim):
        made = {"bubble": each.predicted.get("bubble")}
        grade = Grade(each, {"gpipe": None}, predictions=made)
        report.add(Grade.of_json(each, json.loads(json.dumps(grade.to_json()))))
    rows = (tmp_path / "grades.csv").read_text().splitlines()
    assert rows == [
        "student,points,of,gpipe,predict bubble,notes",
        "ada,2,12,0,2,", "eve,0,12,0,0,", "kim,1,12,0,1,",
    ]  # fmt: skip
    assert (
        "Predicted: 50.0 %, 22.7 percentage points too high; it is 27.3 %"
        in (tmp_path / "pages" / "kim.html").read_text()
    )
    assert question("bubble").truth() == pytest.approx(3 / 11)
