"""A machine that is too busy to judge: nothing counts, the answer is run again, and no grade is a zero for it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mpkit.course.catalogue import find
from mpkit.course.framework.exercise import Case, Seen
from mpkit.course.framework.room import PackedAnswer, Play, Room
from mpkit.course.grading.grades import Grade
from mpkit.course.grading.report import GradeReport, results
from mpkit.course.grading.submissions import HandedIn, handed_in
from mpkit.course.judge import RUNS, judge, not_judged
from mpkit.course.notebooks import write_notebooks
from mpkit.course.sandbox.allowance import BUSY, HANGS, STILL, Allowance, Limits, TooBusy
from mpkit.course.verdict import NotSolved

ENTRY = find("pass-the-token")
RIGHT = PackedAnswer.pack(ENTRY.exercise.solution)


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        pytest.param([(100.0, 50.0, False, True)], "", id="importing takes long"),
        pytest.param([(9.0, 9.0, True, True)], "", id="what came before the first line does not count"),
        pytest.param([(1.0, 1.0, True, True), (9.5, 9.5, True, True)], HANGS, id="it goes on for ever"),
        pytest.param([(1.0, 1.0, True, True), (200.0, 8.0, True, True)], "", id="it waits for a core"),
        pytest.param([(1.0, 1.0, True, True), (301.0, 1.5, True, False)], BUSY, id="it had no core"),
        pytest.param([(301.0, 50.0, False, True)], BUSY, id="it has not begun"),
        pytest.param([(1.0, 1.0, True, True), (301.0, 1.1 + STILL, True, False)], HANGS, id="it hangs, slowly"),
        pytest.param([(1.0, 1.0, True, True), (301.0, 5.0, True, True)], BUSY, id="it moves, slowly"),
    ],
)  # fmt: skip
def test_time_is_what_the_ranks_had(looks: list[tuple[float, float, bool, bool]], said: str) -> None:
    allowance = Allowance(seconds=8.0, patience=300.0)
    assert [allowance.look(*look) for look in looks][-1] == said


def for_ever(ctx: object, token: object) -> object:
    while True:
        pass


def test_ranks_that_had_no_time_are_not_judged() -> None:
    room = Room(limits=Limits(patience=0.0))
    try:
        with pytest.raises(TooBusy, match="too busy"):
            next(iter(ENTRY.exercise.examine(PackedAnswer.pack(for_ever), room)))
    finally:
        room.close()


class BusyRoom(Room):
    """A room whose machine is too busy a number of times; then it is the given one."""

    def __init__(self, room: Room, times: int) -> None:
        self.limits, self.inner, self.times = room.limits, room, times

    def play(self, play: Play, answer: PackedAnswer, case: Case) -> Seen:
        self.times -= 1
        if self.times >= 0:
            raise TooBusy("no core was free")
        return self.inner.play(play, answer, case)


def test_an_answer_runs_again(room: Room) -> None:
    assert judge(ENTRY, RIGHT, BusyRoom(room, RUNS - 1), draw=False).passed
    checked = judge(ENTRY, RIGHT, BusyRoom(room, RUNS), draw=False)
    assert not checked.passed and checked.not_judged
    assert "not judged: busy" in str(checked) and "no core was free" in str(checked)
    assert "says nothing of your answer" in str(checked) and not checked.hint
    with pytest.raises(NotSolved, match="not judged"):
        checked.require()


@pytest.fixture
def notebook(tmp_path: Path) -> HandedIn:
    write_notebooks(tmp_path / "all")
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "all" / "1-ranks.ipynb").rename(folder / "ada.ipynb")
    (each,) = handed_in(folder, (ENTRY.name, "ring-all-reduce"))
    return each


def test_a_grade_has_no_zero_for_it(notebook: HandedIn, tmp_path: Path) -> None:
    busy = not_judged(ENTRY, "no core was free")
    grade = Grade(notebook, {ENTRY.name: busy, "ring-all-reduce": None})
    table = tmp_path / "grades.csv"
    report = GradeReport([notebook], table, tmp_path / "pages")
    report.add(grade)
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert (row[ENTRY.name], row["ring-all-reduce"]) == ("not judged", "0")
    assert "not judged: busy" in (tmp_path / "pages" / "ada.html").read_text()
    (hardness,) = [each for each in report.of_class().exercises if each.name == ENTRY.name]
    assert hardness.solved == 0 and not hardness.mistakes
    tests = {each["name"]: each for each in results([grade])["tests"]}
    assert "score" not in tests[ENTRY.text.title] and "not judged" in tests[ENTRY.text.title]["output"]
