"""A student's file of progress: kept whole, and never in the way."""

from __future__ import annotations

import json
import linecache
import re
from pathlib import Path
from typing import Any

import pytest

import mpkit as mk
from mpkit.course.grading.grades import Grade
from mpkit.course.grading.report import GradeReport
from mpkit.course.grading.submissions import handed_in
from mpkit.course.predictions.predict import PREDICTED, box
from mpkit.course.predictions.questions import QUESTIONS, question
from mpkit.course.progress import FILE, ExerciseProgress, Progress, StudentPrediction
from mpkit.views.theme import STATUS


def test_failures_count_until_it_is_solved(tmp_path: Path) -> None:
    for passed in (False, False, True, False):
        Progress.read(tmp_path).add_check("gpipe", passed).write()
    assert Progress.read(tmp_path).done == {"gpipe": ExerciseProgress(tries=4, failures=1, passed=True)}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "exercises": {"a": {"odd": 1}}}']
)
def test_a_file_that_cannot_be_read_is_put_aside(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.warns(UserWarning, match=r"could not be read.*progress begins anew"):
        found = Progress.read(tmp_path)
    assert found.done == {}
    assert (tmp_path / "mpkit-progress.broken.json").read_text() == text
    found.add_check("gpipe", True).write()
    assert Progress.read(tmp_path).done["gpipe"].passed


def defined_in_a_cell(rows: str, note: str = "") -> object:
    """Return what a cell of a notebook defines that returns these rows."""
    space: dict[str, object] = {"__name__": "__main__"}
    code = f"{note}\ndef gpipe(p, m):\n    return {rows}  {note}\n"
    name = f"<cell {len(linecache.cache)}>"  # a notebook's cells have a source, too
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    exec(compile(code, name, "exec"), space)
    return space["gpipe"]


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("in_a_folder")
def test_the_same_answer_again_is_no_new_try() -> None:
    one_at_a_time = '[" ".join(f"F{i} B{i}" for i in range(m))] * p'
    first = mk.check("gpipe", defined_in_a_cell(one_at_a_time))
    again = mk.check(
        "gpipe", defined_in_a_cell(one_at_a_time, "# the same program in a cell that was run again")
    )
    other = mk.check("gpipe", defined_in_a_cell(one_at_a_time.replace("p", "(p + 0)")))
    assert (first.tries, again.tries, other.tries) == (1, 1, 2)
    assert first.hint == again.hint != other.hint
    assert Progress.read().done["gpipe"].failures == 2


@pytest.mark.usefixtures("in_a_folder")
def test_the_stub_and_a_typing_error_are_no_tries() -> None:
    stub = mk.check(
        "gpipe", defined_in_a_cell("None or (_ for _ in ()).throw(NotImplementedError('your turn'))")
    )
    mistyped = mk.check("gpipe", defined_in_a_cell("[' '.join(f'F{i}' for i in rnge(m))] * p"))
    assert (stub.mistake, mistyped.mistake) == ("not-written", "an-error")
    assert not mistyped.hint and "rnge" in "".join(mistyped.lesson) and "line" in mistyped.lesson[-1]
    assert Progress.read().done["gpipe"] == ExerciseProgress()
    right = mk.check("gpipe", defined_in_a_cell("[' '.join(f'{k}{i}' for k in 'FB' for i in range(m))] * p"))
    assert right.passed and right.tries == 1


MISTYPED = {
    "a name in quotes": (
        ("pass-the-token", "pass_the_token"),
        "not of the type str; write mk.check('pass-the-token', pass",
    ),
    "no answer": (("pass-the-token",), "the answer is the function pass_the_token itself, not None"),
    "an instance": (
        ("groups-of-a-mesh", 3),
        "the answer is the function groups_of_a_mesh itself, not of the type int",
    ),
    "the answer first": ((print, "pass-the-token"), "the exercise's name comes first, in quotes"),
    "an underscore": (("pass_the_token", print), "did you mean 'pass-the-token'"),
}


@pytest.mark.parametrize("case", MISTYPED)
def test_a_mistyped_check_says_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, said = MISTYPED[case]
    with pytest.raises(ValueError, match=re.escape(said)):
        mk.check(*arguments)
    assert not (tmp_path / FILE).exists(), "it is no try"


# ---- Predictions: the first number counts, what was shown counts no more, and what is mistyped is answered.


@pytest.fixture
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder_of_its_own")
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
@pytest.mark.usefixtures("folder_of_its_own")
def test_theory_judges_in_words_in_colour_and_in_points(value: str, words: str, points: int) -> None:
    """A measurement is told beside it: words spoke of the measurement once, and colour and points of theory."""
    guess = mk.predict("bubble", 3 / 11 if value == "3/11" else value)
    compared = guess.against(0.323)
    said = str(compared).splitlines()[0]
    assert f"theory says 27.3 %: {words}. Measured here: 32.3 %." in said
    assert (STATUS["good"] in compared._repr_mimebundle_()["text/html"]) == (points == 2)
    assert 1 + question("bubble").close(guess.value or 0) == points


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda one: one.name)
@pytest.mark.usefixtures("folder_of_its_own")
def test_a_question_is_whole(asked: Any) -> None:
    truth = asked.truth()
    assert asked.close(truth) and not asked.close(2 * truth)
    assert asked.gap(truth, truth) == "just right"
    assert asked.text.endswith("?") and asked.why.endswith(".")


@pytest.mark.usefixtures("folder_of_its_own")
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


@pytest.mark.usefixtures("folder_of_its_own")
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
