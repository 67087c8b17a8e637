"""No answer gets points by anything but a right result: each attack is tried, and a right answer after it passes."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from mpkit.course.catalogue import families, find
from mpkit.course.framework.room import PackedAnswer
from mpkit.course.framework.source import run_cell
from mpkit.course.grading import grader
from mpkit.course.grading.judge_process import Judges
from mpkit.course.notebooks import notebook
from mpkit.course.sandbox import enclose, fair_clock, guard
from mpkit.course.sandbox.fair_clock import FairClock
from mpkit.course.sandbox.guard import Guard, enclose_command, list_descendants
from mpkit.course.verdict import Checked, NotSolved
from tests.classroom.attacks import TOGETHER, TRIED, answer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing encloses processes elsewhere")

ENDS_ITS_RUN = ("writes-the-other-ranks-results", "ends-the-judge")
"""Attacks after which there may be no lines that the ranks printed."""

READS_SOLUTIONS = ("imports-the-exercise", "asks-the-catalogue", "reads-files")
"""Attacks that only a way to hide files prevents."""


WAYS = [enclose.WAYS[0], *(pytest.param(way, marks=pytest.mark.soak) for way in enclose.WAYS[1:])]


@pytest.fixture(scope="module", params=WAYS)
def judges(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judges]:
    """Judges by each way of enclosing them that this machine permits."""
    if not guard.works_here(request.param):
        pytest.skip(f"{request.param}: not permitted here")
    place = tmp_path_factory.mktemp("judge")
    found = Judges(
        place, grader.environment(place), Guard(memory=12 * 2**30, processes=100), way=request.param
    )
    yield found
    found.close()


def judged(judges: Judges, source: str, name: str = "pass-the-token") -> tuple[Checked | None, str]:
    entry = find(name)
    value = run_cell(source, entry.exercise.name_of_answer, "answer", entry.given_code)
    return judges.judge(entry, PackedAnswer.pack(value).packed)


@pytest.mark.alone
@pytest.mark.parametrize("name", TOGETHER)
def test_an_attack_gets_no_points_and_the_next_right_answer_does(judges: Judges, name: str) -> None:
    attacks = [each for each in TOGETHER[name] if judges._way != "none" or each not in READS_SOLUTIONS]
    checked, why = judged(judges, answer(str(judges._place), *attacks))
    assert checked is None or not checked.passed, "an answer that solves nothing got the points"
    printed = "\n".join(checked.printed) if checked is not None else why
    assert "OPENED" not in printed
    if name not in ENDS_ITS_RUN:
        assert TRIED in printed, (printed, checked)
    if checked is not None:
        commands = [" ".join(process.cmdline()) for process in list_descendants(next(iter(judges.pids())))]
        assert sum("fork_server" in command for command in commands) <= 3, "it left a process behind"
    checked, why = judged(judges, find("pass-the-token").source.plain)
    assert checked is not None and checked.passed, (checked, why)


def test_a_hidden_test_calls_nothing_that_the_student_has_replaced() -> None:
    package = next(each for each in families() if each.__name__.endswith(".ranks"))
    cells = notebook(package, "nbgrader").cells
    cell = next(each.source for each in cells if each.id == "pass-the-token-check")
    entry, fake = find("pass-the-token"), MagicMock()
    for source, right in ((entry.source.stub, False), (entry.source.plain, True)):
        value = run_cell(source, entry.exercise.name_of_answer, "answer", entry.given_code)
        with contextlib.nullcontext() if right else pytest.raises(NotSolved, match="not yet"):
            exec(cell, {"mk": fake, entry.exercise.name_of_answer: value})


def test_what_is_hidden_cannot_be_read_and_the_rest_can(tmp_path: Path) -> None:
    (tmp_path / "hidden" / "own").mkdir(parents=True)
    (tmp_path / "hidden" / "secret").write_text("42")
    (tmp_path / "beside").write_text("43")
    (tmp_path / "link").symlink_to(tmp_path / "hidden")
    code = "import sys; open('mine', 'w').close(); print(open(sys.argv[1]).read())"
    for way in enclose.WAYS[:-1]:
        if not guard.works_here(way):
            continue
        for path, readable in (("hidden/secret", False), ("link/secret", False), ("beside", True)):
            command = [sys.executable, "-c", code, str(tmp_path / path)]
            command = enclose_command(command, tmp_path / "hidden" / "own", [str(tmp_path / "hidden")], way)
            done = subprocess.run(command, cwd=tmp_path / "hidden" / "own", capture_output=True, text=True)
            assert (done.stdout == "43\n", done.returncode == 0) == (readable, readable), (way, done.stderr)
    assert (tmp_path / "hidden" / "own" / "mine").exists()


@pytest.mark.parametrize(("name", "used"), [("pass-the-token", "given"), ("micro-batches", "torch")])
def test_a_function_is_sent_to_ranks_without_the_module_that_has_the_solution(name: str, used: str) -> None:
    """A `play` of the exercise's own, and one that `call_with` makes of the inputs."""
    from mpkit.course.framework.room import _send_exercises_by_value
    from mpkit.strategies.packing.packing import dumps

    play = find(name).exercise.play  # type: ignore[attr-defined]
    _send_exercises_by_value()
    code = """
import pickle, sys
play = pickle.load(sys.stdin.buffer)
for each in (play, *(cell.cell_contents for cell in play.__closure__ or ())):
    print(*each.__globals__)
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], input=dumps(play), capture_output=True, check=True)
    names = done.stdout.decode().split()
    assert used in names
    assert not [name for name in names if name.startswith("mpkit.course.exercises") or name == "EXERCISE"]


@pytest.mark.parametrize(
    ("cpu", "queued", "seconds"),
    [(0.0, 0.0, 10.0), (0.5, 9.5, 0.5), (10.0, 0.0, 10.0), (8.0, 9.0, 8.0)],
    ids=["it sleeps", "it queues for a core", "it computes", "its processes crowd each other out"],
)
def test_a_fair_clock_stands_while_a_process_queues(
    cpu: float, queued: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(fair_clock.time, "monotonic", lambda: 10 * now[0])
    monkeypatch.setattr(fair_clock, "cores", lambda: 1)
    monkeypatch.setattr(fair_clock, "cpu_seconds", lambda pid: now[0] * cpu)
    monkeypatch.setattr(fair_clock, "_queued_time", lambda pid: now[0] * queued)
    clock = FairClock()
    clock.look([1])
    now[0] = 1.0
    assert clock.look([1]) == pytest.approx(seconds)
