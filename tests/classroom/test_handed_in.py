"""What is handed in may be anything, names too; and a grading that was stopped goes on."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mpkit.course.catalogue import find
from mpkit.course.framework.exercise import Case, CheckRow, Seen
from mpkit.course.framework.room import PackedAnswer, Play, Room
from mpkit.course.grading import grade as grading
from mpkit.course.grading.grades import Grade
from mpkit.course.grading.report import GradeReport, page_names, results, write_gradescope
from mpkit.course.grading.roster import due_date, read_roster
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
        "pipe",
        "folder",
        "link",
        "device",
        "huge",
    }
    for each in found.values():
        assert each.broken.startswith("it cannot be read as a notebook: "), each.student
        assert "gpipe" in [entry.name for entry in each.exercises], (
            "it should have answered what the others do"
        )
    assert "a link" in found["link"].broken
    assert "no file" in found["pipe"].broken


# ---------------------------------------------------------------- names, rows and pages


ODD = [
    "Kim Lee",
    "Kim_Lee",
    "kim lee",
    "=cmd()",
    'a"b',
    "a\nb",
    "<img src=x>",
    "..",
    "x" * 200,
    "\udcff",
    "ä",
]


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
    (folder / "ada").mkdir()
    (folder / "ada" / "ada.ipynb").write_bytes(GOOD)
    found = handed_in(folder, ("gpipe",))
    students = [each.student for each in found]
    assert len(set(students)) == len(ODD) + 2
    assert {"ada", "ada.ipynb"} < set(students)
    names = page_names(students)
    assert len({name.casefold() for name in names.values()}) == len(names)
    assert all("/" not in name and len(name) < 120 for name in names.values())
    report = GradeReport(found, tmp_path / "grades.csv", tmp_path / "grades")
    for each in found:
        report.add(solved(each))
    report.finish()
    with (tmp_path / "grades.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["student"] for row in rows] == students
    assert all((row["points"], row["of"]) == ("10", "10") for row in rows)
    assert sorted(path.name for path in (tmp_path / "grades").iterdir()) == sorted(names.values())
    for path in (tmp_path / "grades").iterdir():
        assert "<img" not in path.read_text(encoding="utf-8")


def test_cells_of_the_table_are_no_formulas(tmp_path: Path) -> None:
    (tmp_path / "=1+1.ipynb").write_bytes(b"{}")
    found = handed_in(tmp_path, ("gpipe",))
    GradeReport(found, tmp_path / "grades.csv", None).add(Grade(found[0], {"gpipe": None}, ["@note\x1b[2J"]))
    text = (tmp_path / "grades.csv").read_text()
    assert "'=1+1,0,10,0,'@note\\x1b[2J" in text


@pytest.mark.parametrize(
    "text", ["Ada\nKim Lee\n", "id,Student\r\n1,Ada\r\n2,Kim Lee\r\n", "\ufeffname\nAda\nKim Lee"]
)
def test_who_is_missing_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "roster").write_text(text, encoding="utf-8", newline="")
    assert read_roster(tmp_path / "roster").names == ("Ada", "Kim Lee")
    folder = tmp_path / "class"
    folder.mkdir()
    for name in ("Kim_Lee", "eve"):
        (folder / f"{name}.ipynb").write_bytes(GOOD)
    found = handed_in(folder, ("gpipe",))
    report = GradeReport(found, tmp_path / "grades.csv", None, read_roster(tmp_path / "roster"))
    report.add(*map(solved, found))
    assert (tmp_path / "grades.csv").read_text().splitlines()[1:] == [
        "Kim_Lee,10,10,10,",
        "eve,10,10,10,not in the roster",
        "Ada,0,10,,handed in nothing",
    ]


# ---------------------------------------------------------------- stopped, and gone on


def test_a_stopped_grading_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, output = tmp_path / "class", tmp_path / "grades.csv"
    folder.mkdir()
    for name in ("ada", "eve", "kim"):
        (folder / f"{name}.ipynb").write_bytes(GOOD)
    ran: list[str] = []
    stop_before = "kim"

    def grades(found: Sequence[HandedIn], guard: Any, jobs: int) -> Iterator[Grade]:
        for each in found:
            if each.student == stop_before:
                raise KeyboardInterrupt
            ran.append(each.student)
            yield solved(each)

    monkeypatch.setattr(grading, "_grades", grades)
    monkeypatch.setattr(grading, "adopt_orphans", lambda: None)

    def run(**how: Any) -> list[str]:
        ran.clear()
        grading.grade(folder, ("gpipe",), output=output, pages=tmp_path / "grades", say=lambda _: None, **how)
        return list(ran)

    with pytest.raises(KeyboardInterrupt):
        run()
    rows = output.read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["student", "ada", "eve"]
    assert sorted(path.name for path in (tmp_path / "grades").iterdir()) == ["ada.html", "eve.html"]
    stop_before = ""
    # a line that was cut short is graded again; one that is whole is not
    kept = tmp_path / "grades.graded.jsonl"
    kept.write_text(kept.read_text()[:-20])
    assert run() == ["eve", "kim"]
    assert run() == []
    (folder / "eve.ipynb").write_bytes(GOOD + b"\n")
    assert run() == ["eve"]
    assert run(guard=grading.Guard(seconds=7)) == ["ada", "eve", "kim"]
    assert run(again=True) == ["ada", "eve", "kim"]
    page = (tmp_path / "grades" / "ada.html").read_text()
    assert "solved" in page and "try" not in page
    assert output.read_text().splitlines()[1:] == ["ada,10,10,10,", "eve,10,10,10,", "kim,10,10,10,"]


# ---------------------------------------------------------------- who was late


def test_when_it_was_handed_in(tmp_path: Path) -> None:
    """By the roster first, then nbgrader's time stamp, then the file's time."""
    for name in ("ada", "eve", "kim", "lee"):
        (tmp_path / "class" / name).mkdir(parents=True)
        (tmp_path / "class" / name / "hw.ipynb").write_bytes(GOOD)
    noon = due_date("2026-11-20T12:00+00:00")
    for path in (tmp_path / "class").rglob("*.ipynb"):
        os.utime(path, (noon.timestamp() + 3600,) * 2)
    (tmp_path / "class" / "eve" / "timestamp.txt").write_text("2026-11-20 11:59:59.0 UTC\n")
    (tmp_path / "class" / "kim" / "timestamp.txt").write_text("no time")
    roster = "name,handed in,due\nada,2026-11-20T14:00+02:00,\nlee,,2026-11-20T13:30+00:00\n"
    (tmp_path / "roster.csv").write_text(roster)
    found = handed_in(tmp_path / "class", ("gpipe",))
    report = GradeReport(found, tmp_path / "grades.csv", None, read_roster(tmp_path / "roster.csv"), noon)
    report.add(*map(solved, found))
    with (tmp_path / "grades.csv").open(newline="") as file:
        late = {row["student"]: row["late"] for row in csv.DictReader(file)}
    assert late == {"ada": "", "eve": "", "kim": "1 h late", "lee": ""}
    (tmp_path / "roster.csv").write_text("student,due\nada,whenever\n")
    with pytest.raises(ValueError, match=r"roster.csv, line 2, due: 'whenever' is no time"):
        read_roster(tmp_path / "roster.csv")


# ---------------------------------------------------------------- Gradescope

OF_A_TEST = {"name", "score", "max_score", "status", "output", "output_format", "visibility"}
"""All of these are in Gradescope's specification of results.json."""


def graded(student: str, right: tuple[bool | None, ...], name: str = "hw.ipynb", **more: Any) -> Grade:
    entries = (find("gpipe"), find("pass-the-token"))
    each = HandedIn(student, f"{student}/{name}", entries, questions=("bubble",))
    checked = {
        entry.name: Checked(entry.name, entry.text.title, (CheckRow("all", "1", "1", ok),), ok, hint="think")
        if ok is not None
        else None
        for entry, ok in zip(entries, right, strict=True)
    }
    return Grade(each, checked, **more)


def test_the_sum_of_gradescopes_tests_is_the_grade() -> None:
    one = graded("ada", (True, False), notes=["cell 3: \x1b[2J"], predictions={"bubble": 0.27})
    said = json.loads(json.dumps(results([one])))
    assert sum(test["score"] for test in said["tests"]) == one.total == 12
    assert sum(test["max_score"] for test in said["tests"]) == one.most == 22
    assert all(set(test) == OF_A_TEST for test in said["tests"])
    assert [test["status"] for test in said["tests"]] == ["passed", "failed", "passed"]
    assert "Hint: think" in said["tests"][1]["output"]
    assert said["output"] == "cell 3: \\x1b[2J"
    said = results([graded("ada", (True, None)), graded("ada", (False, None), "again.ipynb")])
    assert [test["score"] for test in said["tests"]] == [10, 0, 0], "of two notebooks the best counts"
    assert "no answer was found" in said["tests"][1]["output"]


def test_a_file_is_one_students_and_a_folder_the_class(tmp_path: Path) -> None:
    grades = [graded("Kim Lee", (True, True)), graded("Kim_Lee", (None, None))]
    (one,) = write_gradescope(tmp_path / "results" / "results.json", grades[:1])
    assert json.loads(one.read_text())["tests"][0]["score"] == 10
    written = write_gradescope(tmp_path / "class", grades)
    assert len(set(written)) == 2 and all(path.suffix == ".json" for path in written)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"a folder is asked for, or a file that ends in .json"):
        write_gradescope(tmp_path / "file", grades)


# ---- A machine that is too busy to judge: nothing counts, the answer is run again, and no grade is a zero for it.

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
