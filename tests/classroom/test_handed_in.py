"""What is handed in may be anything, names too; and a grading that was stopped goes on."""

import contextlib
import csv
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mpkit.course.catalogue import find
from mpkit.course.framework.exercise import Case, CheckRow, Seen
from mpkit.course.framework.room import PackedAnswer, Play, Room
from mpkit.course.grading import grade as grading
from mpkit.course.grading.grades import Grade
from mpkit.course.grading.report import GradeReport, page_name
from mpkit.course.grading.submissions import HandedIn, handed_in
from mpkit.course.judge import RUNS, judge, not_judged
from mpkit.course.notebooks import write_notebooks
from mpkit.course.sandbox.allowance import BUSY, HANGS, STILL, Allowance, Limits, TooBusy
from mpkit.course.verdict import Checked, NotSolved


def book(*cells: str) -> bytes:
    return json.dumps({"cells": [{"cell_type": "code", "source": source} for source in cells]}).encode()


GOOD = book('mk.check("gpipe", gpipe)')

MALFORMED: dict[str, bytes] = {
    "nested deep": b"[" * 100_000,
    "nested deep in a cell": b'{"cells": [' + b'{"a":' * 50_000,
    "no cells": b"{}",
    "a source of numbers": b'{"cells": [{"cell_type": "code", "source": [1]}]}',
    "empty": b"",
    "of other bytes": b"\xff\xfe" + GOOD,
    "a number of many digits": b"9" * 100_000,
}


def test_no_file_stops_a_class_from_being_read(tmp_path: Path) -> None:
    for number, data in enumerate(MALFORMED.values()):
        (tmp_path / f"bad-{number}.ipynb").write_bytes(data)
    os.mkfifo(tmp_path / "pipe.ipynb")
    (tmp_path / "folder.ipynb").mkdir()
    (tmp_path / "link.ipynb").symlink_to("/dev/zero")
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "a.ipynb").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path)
    with (tmp_path / "huge.ipynb").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "good.ipynb").write_bytes(GOOD)
    found = {each.student: each for each in handed_in(tmp_path)}
    assert found.pop("good").broken == ""
    assert set(found) == {f"bad-{i}" for i in range(len(MALFORMED))} | {
        "pipe", "folder", "link", "device", "huge",
    }  # fmt: skip
    for each in found.values():
        assert each.broken.startswith("it cannot be read as a notebook: "), each.student
        assert "gpipe" in [entry.name for entry in each.exercises], (
            "it should have answered what the others do"
        )
    assert "a link" in found["link"].broken
    assert "no file" in found["pipe"].broken


ODD = [
    "Kim Lee", "Kim_Lee", "kim lee", "=cmd()", 'a"b', "a\nb", "<img src=x>", "..", "x" * 200, "\udcff", "ä",
]  # fmt: skip


def solved(each: HandedIn, *, points: bool = True) -> Grade:
    checked: dict[str, Checked | None] = {
        entry.name: Checked(entry.name, entry.text.title, (CheckRow("all", "1", "1", points),), points)
        for entry in each.exercises
    }
    return Grade(each, checked)


def test_no_two_names_share_a_row_or_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    for name in ODD:
        (folder / f"_{name}").mkdir(parents=True)
        (folder / f"_{name}" / "hw.ipynb").write_bytes(GOOD)
    (folder / "ada.ipynb").write_bytes(GOOD)
    found = handed_in(folder, ("gpipe",))
    students = [each.student for each in found]
    assert len(set(students)) == len(ODD) + 1
    names = [page_name(student) for student in students]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) < 120 for name in names)
    report = GradeReport(found, tmp_path / "grades.csv")
    for each in found:
        report.add(solved(each))
    report.finish()
    with (tmp_path / "grades.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["student"] for row in rows] == students
    assert all((row["points"], row["of"]) == ("10", "10") for row in rows)
    assert sorted(path.name for path in (tmp_path / "grades").iterdir()) == sorted(names)
    for path in (tmp_path / "grades").iterdir():
        assert "<img" not in path.read_text(encoding="utf-8")


def test_cells_of_the_table_are_no_formulas(tmp_path: Path) -> None:
    (tmp_path / "=1+1.ipynb").write_bytes(b"{}")
    found = handed_in(tmp_path, ("gpipe",))
    GradeReport(found, tmp_path / "grades.csv").add(Grade(found[0], {"gpipe": None}, ["@note\x1b[2J"]))
    text = (tmp_path / "grades.csv").read_text()
    assert "'=1+1,0,10,0,'@note\\x1b[2J" in text


def test_a_stopped_grading_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, output = tmp_path / "class", tmp_path / "grades.csv"
    folder.mkdir()
    for name in ("ada", "eve", "kim"):
        (folder / f"{name}.ipynb").write_bytes(GOOD)
    ran: list[str] = []
    stop_before = "kim"

    class Grader(contextlib.nullcontext[Any]):
        def __enter__(self) -> Any:
            return self

        def all(self, submissions: Sequence[HandedIn]) -> Iterator[Grade]:
            for each in submissions:
                if each.student == stop_before:
                    raise KeyboardInterrupt
                ran.append(each.student)
                yield solved(each)

    monkeypatch.setattr(grading, "Grader", Grader)
    for name in ("adopt_orphans", "make_undumpable"):
        monkeypatch.setattr(grading, name, lambda: None)

    def run(**how: Any) -> list[str]:
        ran.clear()
        grading.grade(folder, ("gpipe",), output=output, say=lambda _: None, **how)
        return list(ran)

    with pytest.raises(KeyboardInterrupt):
        run()
    rows = output.read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["student", "ada", "eve"]
    assert sorted(path.name for path in (tmp_path / "grades").iterdir()) == ["ada.html", "eve.html"]
    stop_before = ""
    assert run() == ["kim"]
    assert run() == []
    (folder / "eve.ipynb").write_bytes(GOOD + b"\n")
    assert run() == ["eve"]
    assert run(guard=grading.Guard(seconds=7)) == ["ada", "eve", "kim"]
    kept = tmp_path / "grades.graded.json"
    kept.write_text(kept.read_text()[:-20])
    with pytest.raises(ValueError, match=r"grades.graded.json has the grades so far, .*: remove it"):
        run()
    kept.unlink()
    assert run() == ["ada", "eve", "kim"]
    page = (tmp_path / "grades" / "ada.html").read_text()
    assert "solved" in page and "try" not in page
    assert output.read_text().splitlines()[1:] == ["ada,10,10,10,", "eve,10,10,10,", "kim,10,10,10,"]


# ---- A machine that is too busy to judge: nothing counts, the answer is run again, and no grade is a zero for it.

ENTRY = find("pass-the-token")
RIGHT = PackedAnswer.pack(ENTRY.exercise.solution)


@pytest.mark.parametrize(("looks", "said"), [
    pytest.param([(100.0, 50.0, False, True)], "", id="importing takes long"),
    pytest.param([(9.0, 9.0, True, True)], "", id="what came before the first line does not count"),
    pytest.param([(1.0, 1.0, True, True), (9.5, 9.5, True, True)], HANGS, id="it goes on for ever"),
    pytest.param([(1.0, 1.0, True, True), (200.0, 8.0, True, True)], "", id="it waits for a core"),
    pytest.param([(1.0, 1.0, True, True), (301.0, 1.5, True, False)], BUSY, id="it had no core"),
    pytest.param([(301.0, 50.0, False, True)], BUSY, id="it has not begun"),
    pytest.param([(1.0, 1.0, True, True), (301.0, 1.1 + STILL, True, False)], HANGS, id="it hangs, slowly"),
    pytest.param([(1.0, 1.0, True, True), (301.0, 5.0, True, True)], BUSY, id="it moves, slowly"),
])  # fmt: skip
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
    report = GradeReport([notebook], table)
    report.add(grade)
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert (row[ENTRY.name], row["ring-all-reduce"]) == ("not judged", "0")
    assert "not judged: busy" in (tmp_path / "grades" / "ada.html").read_text()
    assert re.search(rf"{ENTRY.name} +0 of 1 +none seen", report.summary())
