"""A student's file of progress: kept whole, and never in the way."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pytest

import mpkit as mk
from mpkit.course.progress import FILE, ExerciseProgress, Progress


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


def box(rows: str, note: str = "") -> object:
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
    first = mk.check("gpipe", box(one_at_a_time))
    again = mk.check("gpipe", box(one_at_a_time, "# the same program in a cell that was run again"))
    other = mk.check("gpipe", box(one_at_a_time.replace("p", "(p + 0)")))
    assert (first.tries, again.tries, other.tries) == (1, 1, 2)
    assert first.hint == again.hint != other.hint
    assert Progress.read().done["gpipe"].failures == 2


@pytest.mark.usefixtures("in_a_folder")
def test_the_stub_and_a_typing_error_are_no_tries() -> None:
    stub = mk.check("gpipe", box("None or (_ for _ in ()).throw(NotImplementedError('your turn'))"))
    mistyped = mk.check("gpipe", box("[' '.join(f'F{i}' for i in rnge(m))] * p"))
    assert (stub.mistake, mistyped.mistake) == ("not-written", "an-error")
    assert not mistyped.hint and "rnge" in "".join(mistyped.lesson) and "line" in mistyped.lesson[-1]
    assert Progress.read().done["gpipe"] == ExerciseProgress()
    right = mk.check("gpipe", box("[' '.join(f'{k}{i}' for k in 'FB' for i in range(m))] * p"))
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
