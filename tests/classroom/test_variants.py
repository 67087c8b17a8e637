"""Variants: each student has numbers of their own, and every set of them makes a whole exercise."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

import mpkit as mk
from mpkit.cli import main
from mpkit.course.catalogue import ExerciseEntry, families, find, of_family
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.source import run_cell
from mpkit.course.framework.variants import Variant
from mpkit.course.judge import judge
from mpkit.course.notebooks import write_variants
from tests.classroom.due import marks

ENTRIES = [
    entry for package in families() for entry in of_family(package.__name__.rsplit(".", 1)[1]) if entry.varies
]
STUDENTS = ("Ada", "Bob", "Kim Lee")
WHOLE = [
    pytest.param(entry, student, marks=marks(entry, student))
    for entry in ENTRIES
    for student in (STUDENTS if entry.family == "reading_lab" else STUDENTS[:1])  # ranks take longer
]


def of(entry: ExerciseEntry, student: str) -> ExerciseEntry:
    return replace(entry, variant=str(Variant.for_student("pp-2026", student)))


def answer(entry: ExerciseEntry, code: str) -> PackedAnswer:
    return PackedAnswer.pack(run_cell(code, entry.exercise.name_of_answer, "answer", entry.given_code))


@pytest.mark.parametrize("entry, student", WHOLE, ids=lambda one: getattr(one, "name", one))
def test_each_variant_is_a_whole_exercise(room: Room, entry: ExerciseEntry, student: str) -> None:
    own = of(entry, student)
    assert judge(own, answer(own, own.source.solution), room, draw=False).passed
    stub = judge(own, answer(own, own.source.stub), room, draw=False)
    assert stub.hint == own.exercise.start
    for mistake in own.exercise.mistakes:
        checked = judge(own, answer(own, mistake.wrong), room, draw=False)
        assert not checked.passed and checked.mistake == mistake.name, f"{mistake.name}\n{checked}"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_dozen_students_share_few_numbers(entry: ExerciseEntry) -> None:
    ours = [of(entry, f"student {number}") for number in range(12)]
    texts = {f"{one.text.task} {one.given_code} {getattr(one.exercise, 'cases', ())}" for one in ours}
    assert len(texts) >= 4


def test_the_text_has_no_placeholder_left() -> None:
    for entry in (entry for entry in ENTRIES if entry.family == "reading_lab"):
        assert "{" not in entry.text.task and "{" not in of(entry, "Ada").text.task


def test_a_variant_is_one_students(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ada, bob = (str(Variant.for_student("pp-2026", name)) for name in ("Ada", "Bob"))
    own = find("double-the-micro-batches", ada)
    right = run_cell(own.source.solution, "predictions", "answer", own.given_code)
    assert mk.check("double-the-micro-batches", right, variant=ada).passed
    with pytest.raises(ValueError, match=r"the progress in this folder is that of 'Ada:"):
        mk.check("double-the-micro-batches", right, variant=bob)
    with pytest.raises(ValueError, match="everybody has numbers of their own"):
        mk.check("double-the-micro-batches", right)
    with pytest.raises(ValueError, match="no variant that was handed out"):
        mk.check("double-the-micro-batches", right, variant=ada.replace("Ada", "Eve"))
    monkeypatch.chdir(tmp_path.parent)


def test_a_roster_gets_notebooks_and_grades(tmp_path: Path) -> None:
    """Ada and Kim hand in their own, and Bob hands in Ada's."""
    roster, out, class_ = tmp_path / "roster.csv", tmp_path / "out", tmp_path / "class"
    roster.write_text("student\nAda\nBob\nKim Lee\n", encoding="utf-8")
    main(["exercises", str(out), "--roster", str(roster), "--course", "pp-2026"])
    assert {path.name for path in (out / "students").iterdir()} == {"Ada", "Bob", "Kim Lee"}
    for student, whose in (("Ada", "Ada"), ("Bob", "Ada"), ("Kim Lee", "Kim Lee")):
        (class_ / student).mkdir(parents=True)
        shutil.copy(out / "solved" / whose / "9-reading-lab.ipynb", class_ / student)
    book = nbformat.read(class_ / "Ada" / "9-reading-lab.ipynb", as_version=4)
    assert book.metadata["mpkit"] == {"student": "Ada", "variant": str(Variant.for_student("pp-2026", "Ada"))}
    asked = "an-uneven-pipeline,double-the-micro-batches"
    table = tmp_path / "grades.csv"
    command = ["grade", str(class_), "-o", str(table), "--roster", str(roster), "--exercises", asked]
    main([*command, "--course", "pp-2026"])
    rows = {row["student"]: row for row in csv.DictReader(table.read_text().splitlines())}
    assert rows["Ada"]["points"] == rows["Kim Lee"]["points"] == "20"
    assert "numbers" not in rows["Ada"]["notes"] + rows["Kim Lee"]["notes"]
    assert rows["Bob"]["points"] == "0"
    assert (
        "the notebook has the numbers of 'Ada'; it is judged with the numbers of 'Bob'"
        in rows["Bob"]["notes"]
    )
    main(command)  # without the course, a notebook is judged with the numbers that it names
    rows = {row["student"]: row for row in csv.DictReader(table.read_text().splitlines())}
    assert rows["Bob"]["points"] == "20"
    assert "the notebook has the numbers of 'Ada'" in rows["Bob"]["notes"]


def test_a_folder_leads_back_to_its_student(tmp_path: Path) -> None:
    names = ["Nora O'Hara", "Zoë", "A/B: C?", "..", ".hidden"]
    written = write_variants(tmp_path, "pp-2026", names)
    folders = {path.parent.name for path in written}
    keys = {Variant.for_student("pp-2026", name).key for name in names}
    assert len(folders) == len(names) and not any(name.startswith(".") for name in folders)
    assert {Variant.for_student("pp-2026", folder).key for folder in folders} == keys


def test_a_roster_without_a_course_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roster = tmp_path / "roster.csv"
    roster.write_text("Kim Lee\nkim_lee\n", encoding="utf-8")
    for more, said in (([], "--course"), (["--course", "x"], "would share a folder")):
        with pytest.raises(SystemExit):
            main(["exercises", str(tmp_path / "out"), "--roster", str(roster), *more])
        assert said in capsys.readouterr().err
