"""The gate names what failed, in its last 60 lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.gate.__main__ import TWO, Gate
from scripts.gate.report import LINES
from scripts.gate.touched import touched

PLANTED = """
import os, pathlib, time
import pytest

def test_passes(): pass

def test_fails(): assert 1 + 1 == 3

def test_aborts(): os.abort()

@pytest.mark.timeout(1)
def test_hangs(): time.sleep(10**6)

def test_fails_at_first():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    before = seen.exists()
    seen.touch()
    assert before, "not seen before"
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin -p pytest_timeout")
    (tmp_path / "test_planted.py").write_text(PLANTED)
    return Gate(tmp_path, tmp_path / "out")


def test_what_failed_is_named(gate: Gate, tmp_path: Path) -> None:
    gate.pytest("tests", "", TWO)
    (tmp_path / "fetch.sh").write_text("echo no route to the mirror >&2; exit 1")
    assert gate.download("browser tests", ["sh", str(tmp_path / "fetch.sh")], pauses=(0, 0)) is None
    gate.again()
    lines = gate.report.lines("quiet")
    text = "\n".join(lines)
    print(text)
    assert not gate.report.holds and len(lines) <= LINES
    assert "FAILED test_planted.py:7 test_planted.py::test_fails\nci:   assert (1 + 1) == 3" in text
    assert "::test_aborts\nci:   worker 'gw" in text and "crashed while running" in text
    assert "::test_hangs\nci:   Failed: Timeout (>1" in text
    assert "FLAKY" in text and "::test_fails_at_first\nci:   AssertionError: not seen before" in text
    assert "again, alone: passed, passed" in text and "again, alone: failed, failed" in text
    assert "NOT RUN browser tests" in text and "no route to the mirror" in text
    assert lines[-1] == "1 passed, 3 failed"


def test_a_flaky_test_does_not_fail_the_gate(gate: Gate) -> None:
    gate.pytest("tests", "", ("-k", "passes or at_first"))
    gate.again()
    assert gate.report.holds and len(gate.report.flaky) == 1


def test_a_step_that_ends_without_a_failed_test_fails_the_gate(gate: Gate) -> None:
    gate.pytest("tests", "", ("--no-such-option",))
    assert not gate.report.holds and "STEP tests: ended with 4" in "\n".join(gate.report.lines("quiet"))


def test_a_slice_of_the_soak_begins_nothing_after_its_time(gate: Gate) -> None:
    gate.pytest("soak", "", ("--draw=word", "--until=1"))
    assert gate.report.holds and gate.report.lines("quiet")[-1] == "0 passed, 0 failed"


def test_parts_are_whole_together(gate: Gate) -> None:
    for part in (1, 2, 3):
        how = (f"--part={part}/3", "-k", "passes or fails")
        gate.pytest(f"part {part}", "", how)
    assert len(gate.report.records()) == 3


def test_what_a_change_touches() -> None:
    root = Path(__file__).parents[2]
    assert touched(root, ["mpkit/zero/zero.py", "notebooks/gone.ipynb"]).tests == ()
    found = touched(root, ["README.md", "notebooks/03-zero.ipynb", "mpkit/launch/watch/span.py"])
    exact = "tests/test_tutorials.py::test_fast_cells_run[03-zero]"
    assert found.tests == ("notebooks/03-zero.ipynb", "tests/test_readme.py", exact) and found.systems
