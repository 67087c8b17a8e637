"""A student's file of progress: kept whole, and never in the way."""

import linecache
import re
from pathlib import Path
from typing import Any

import pytest

import mpkit as mk
from mpkit.course.predictions.predict import box
from mpkit.course.predictions.questions import all_questions
from mpkit.course.progress import FILE, ExerciseProgress, Progress
from mpkit.views.theme import STATUS


def test_failures_count_until_it_is_solved(tmp_path: Path) -> None:
    for passed in (False, False, True, False):
        Progress.read(tmp_path).add_check("gpipe", passed).write()
    assert Progress.read(tmp_path).done == {"gpipe": ExerciseProgress(tries=4, failures=1, passed=True)}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"exercises": {"a": {"odd": 1}}}'])
def test_a_file_that_cannot_be_read_is_kept_and_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(
        ValueError, match=rf"{FILE} has your progress, and cannot be read .*: move or remove it"
    ):
        Progress.read(tmp_path)
    assert (tmp_path / FILE).read_text() == text


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


@pytest.fixture(autouse=True)
def folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_first_number_counts() -> None:
    assert mk.predict("bubble").value is None
    assert mk.predict("bubble", 0.25).value == 0.25
    again = mk.predict("bubble", "30 %")
    assert again.value == 0.25 and "25.0 % was locked in first, and stays" in str(again)
    compared = again.against(0.323)
    assert "2.3 percentage points too low" in str(compared)
    assert Progress.read().predictions == {"bubble": 0.25}


@pytest.mark.parametrize(
    "value, words, close", [("3/11", "just right", True), ("32.3 %", "5.0 percentage points too high", False)]
)
def test_theory_judges_in_words_and_in_colour(value: str, words: str, close: bool) -> None:
    """A measurement is told beside it: words spoke of the measurement once, and colour of theory."""
    guess = mk.predict("bubble", 3 / 11 if value == "3/11" else value)
    compared = guess.against(0.323)
    said = str(compared).splitlines()[0]
    assert f"theory says 27.3 %: {words}. Measured here: 32.3 %." in said
    assert (STATUS["good"] in compared._repr_mimebundle_()["text/html"]) == close


@pytest.mark.parametrize("asked", all_questions().values(), ids=lambda one: one.name)
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
