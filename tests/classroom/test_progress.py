"""A student's file of progress: kept whole, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpkit as mk
from mpkit.classroom.progress import FILE, Done, Progress


def test_failures_count_until_it_is_solved(tmp_path: Path) -> None:
    for passed in (False, False, True, False):
        Progress.read(tmp_path).after("gpipe", passed).write()
    assert Progress.read(tmp_path).done == {"gpipe": Done(tries=4, failures=1, passed=True)}
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
    found.after("gpipe", True).write()
    assert Progress.read(tmp_path).done["gpipe"].passed


def test_where_nothing_can_be_written_a_warning_says_so(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.warns(UserWarning, match="not kept"):
        Progress.read(gone).after("gpipe", True).write()


def test_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Progress.read(tmp_path).after("gpipe", True).after("pass-the-token", False).write()
    shown = mk.progress(tmp_path)
    assert "✔ gpipe" in str(shown) and "✗ pass-the-token" in str(shown)
    assert "GPipe" in shown._repr_html_()


def test_hints_get_more_specific(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def gpipe(p: int, m: int) -> list[str]:
        return [" ".join(f"F{i} B{i}" for i in range(m))] * p

    hints = [mk.check("gpipe", gpipe).hint for _ in range(4)]
    assert hints[0] != hints[1] and hints[-1] == hints[-2]


def test_a_mistyped_name_is_told() -> None:
    with pytest.raises(ValueError, match="did you mean 'gpipe'"):
        mk.check("gpip", lambda p, m: [])
    with pytest.raises(ValueError, match=r"mk.progress\(\) lists"):
        mk.check("xyz", None)


def test_an_answer_that_cannot_be_sent_is_told(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file, pytest.raises(ValueError, match="cannot be sent"):
        mk.check("gpipe", lambda p, m: file)
