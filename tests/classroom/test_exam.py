"""An exam: checks without a verdict, and an mpkit without solutions, installed as a student has it."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import nbformat
import pytest

import mpkit as mk
from mpkit.course.catalogue import families, find, of_family
from mpkit.course.framework.source import run_cell
from mpkit.course.judge import NotSolved
from mpkit.course.notebooks import write_notebooks

HOME = Path(__file__).parents[2]
ENTRIES = [entry for package in families() for entry in of_family(package.__name__.rsplit(".", 1)[1])]
WRONG = """
def pass_the_token(ctx, token):
    return token
"""
FAILS = """
def pass_the_token(ctx, token):
    return tokens + 1
"""


def cell(name: str, code: str) -> object:
    entry = find(name)
    return run_cell(code, entry.exercise.name_of_answer, "answer", entry.given_code)


def test_an_exam_says_only_whether_there_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stub = find("pass-the-token").source.stub
    said = {
        code: mk.check("pass-the-token", cell("pass-the-token", code), exam=True)
        for code in (stub, WRONG, FAILS)
    }
    assert [one.has_answer for one in said.values()] == [False, True, False]
    assert not any(one.passed or one.hint or one.mistake for one in said.values())
    assert str(said[WRONG]).splitlines()[0] == "Pass a token round a ring: answered"
    assert "nothing is written yet" in str(said[stub])
    assert "name 'tokens' is not defined" in str(said[FAILS]) and "line 3 of the cell" in str(said[FAILS])
    assert json.loads((tmp_path / "mpkit-progress.json").read_text())["exercises"] == {}
    with pytest.raises(NotSolved, match="answered"):
        said[WRONG].require()


def test_questions_without_an_answer_are_named() -> None:
    some = {"a": "scatter", "b": ..., "c": "reduce"}
    checked = mk.check("which-collective", some, exam=True)
    assert not checked.has_answer and "no answer yet to b, d, e, f, g, h, i, j" in str(checked)


def test_the_notebooks_of_an_exam(tmp_path: Path) -> None:
    written = write_notebooks(tmp_path, exam=True)
    students = [path for path in written if path.parent == tmp_path]
    for path in students:
        book = nbformat.read(path, as_version=4)
        checks = [each.source for each in book.cells if each.id.endswith("-check")]
        assert checks and all(source.endswith(", exam=True)") for source in checks)
        assert book.metadata["mpkit"]["exam"] is True
    assert "exam" not in (tmp_path / "solved" / "1-ranks.ipynb").read_text()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    target = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, "-m", "scripts.exam", str(target)], cwd=HOME, check=True)
    return sorted(target.glob("*.whl"))


@pytest.mark.soak
def test_no_file_of_the_students_wheel_has_a_solution(wheels: list[Path]) -> None:
    with ZipFile(wheels[0]) as wheel:
        files = {
            name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith((".py", ".md"))
        }
    for entry in ENTRIES:
        path = entry.module.replace(".", "/")
        own = files[path + ".py"] + files[path + ".md"]
        assert "## Mistake" not in own and "when=" not in own and "SOLUTION" not in own
        stub = set(entry.source.stub.splitlines())
        written = [line for line in entry.source.plain.splitlines() if line not in stub and len(line) > 50]
        given = entry.given_code + entry.text.task
        told = [line for line in written if line in own and line not in given]
        assert len(told) <= 1, (
            f"{entry.name}: {told}"
        )  # code that plays an answer may have a line in common with it


PROGRAM = """
import mpkit as mk
from mpkit.course.catalogue import families, of_family
from mpkit.course.framework.source import run_cell

for package in families():
    for entry in of_family(package.__name__.rsplit(".", 1)[1]):
        entry.exercise.name_of_answer, entry.text.task, entry.given_code
code = {code!r}
checked = mk.check("pass-the-token", run_cell(code, "pass_the_token"))
print("SAID", str(checked).splitlines()[0])
"""

EVERY = """
import json
import mpkit as mk
from mpkit.course.catalogue import find
from mpkit.course.framework.source import run_cell

for name, (right, stub) in json.load(open("cells.json")).items():
    entry = find(name)
    for code, answered in ((right, True), (stub, False)):
        cell = run_cell(code, entry.exercise.name_of_answer, "answer", entry.given_code)
        checked = mk.check(name, cell)
        assert checked.has_answer is answered, str(checked)
print("ALL")
"""


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_wheels_as_students_and_graders_install_them(wheels: list[Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    libraries = sysconfig.get_path("purelib")
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    Path(site, "libraries.pth").write_text(libraries + "\n")  # torch and the others, without a network

    def install(wheel: Path) -> None:
        command = [python, "-m", "pip", "install", "--no-deps", "--no-index", "-q", str(wheel)]
        subprocess.run(command, check=True, cwd=tmp_path)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([python, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        return done

    # ---- the student
    install(wheels[0])
    said = run("-c", PROGRAM.format(code=WRONG))
    assert "SAID Pass a token round a ring: answered" in said.stdout, said.stdout + said.stderr
    right = find("pass-the-token").source.plain
    (tmp_path / "handed_in").mkdir()
    cells = [nbformat.v4.new_code_cell(f"import mpkit as mk\nfrom torch import Tensor\n{right}")]
    cells.append(nbformat.v4.new_code_cell('mk.check("pass-the-token", pass_the_token, exam=True)'))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "handed_in" / "ada.ipynb")
    refused = run("-m", "mpkit", "grade", "handed_in")
    assert refused.returncode and "mpkit-solutions" in refused.stderr, refused.stderr
    cells_of = {entry.name: [entry.source.plain, entry.source.stub] for entry in ENTRIES[::6]}
    (tmp_path / "cells.json").write_text(json.dumps(cells_of))
    said = run("-c", EVERY)
    assert said.stdout.split()[-1:] == ["ALL"], said.stdout[-2000:] + said.stderr[-2000:]
    # ---- who grades
    install(wheels[1])
    said = run("-c", PROGRAM.format(code=WRONG))
    assert "SAID Pass a token round a ring: not yet" in said.stdout, said.stdout + said.stderr
    assert "SAID Pass a token round a ring: solved" in run("-c", PROGRAM.format(code=right)).stdout
    graded = run("-m", "mpkit", "grade", "handed_in", "--exercises", "pass-the-token")
    assert "ada: 10 of 10" in graded.stdout, graded.stdout + graded.stderr
