"""Grading a class, interrupted and resumed: each notebook gets its own grade, whatever the
others do, and nothing is left behind."""

import csv
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from mpkit.course.catalogue import find
from mpkit.course.framework.source import IMPORTS
from mpkit.course.sandbox.guard import Guard, way_to_enclose
from tests.classroom.control_group import control_group
from tests.limits import wait_for

NAMES = ("pass-the-token", "gpipe")
NOTHING, ALL, EITHER = (0,), (20,), (0, 20)
"""Points: what a notebook answers is right, and counts unless the notebook has ended its own process before."""

HANDED_IN: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("handed_in.toml").read_text(encoding="utf-8")
)
HOSTILE: dict[str, tuple[str, tuple[int, ...]]] = {
    name: (code, points)
    for kind, points in {"nothing": NOTHING, "all": ALL, "either": EITHER}.items()
    for name, code in HANDED_IN["hostile"][kind].items()
}
OF_THE_KIT, ON_RANKS, STYLES = (HANDED_IN[kind] for kind in ("of_the_kit", "on_ranks", "styles"))


def cells(**answers: str) -> list[str]:
    """A student's notebook: the first cell, and an answer and a check for each exercise."""
    found = [IMPORTS]
    for name in NAMES:
        source = find(name).source
        answer = find(name).exercise.name_of_answer
        found += [answers.get(name.replace("-", "_"), source.plain), f'mk.check("{name}", {answer})']
    return found


def wrong(name: str, number: int) -> str:
    entry = find(name)
    return entry.exercise.mistakes[number % len(entry.exercise.mistakes)].wrong


def token(body: str) -> str:
    """An answer to pass-the-token that does that."""
    return f"def pass_the_token(ctx, token):\n    {body}\n"


def own(home: Path, code: str) -> str:
    """A cell of that code, which knows where the class is."""
    return f"HOME = {str(home)!r}\n{code}"


def a_class(home: Path) -> dict[str, tuple[list[str] | str, tuple[int, ...]]]:
    """Students: what each hands in, and the points for it."""
    found: dict[str, tuple[list[str] | str, tuple[int, ...]]] = {"good": (cells(), ALL)}
    for name, code in STYLES.items():
        key = "gpipe" if name.startswith("gpipe") else "pass_the_token"
        found[f"style-{name}"] = (cells(**{key: code}), ALL)
    found["twice"] = (cells(gpipe=wrong("gpipe", 0)), ALL)  # and again.ipynb, which is right
    found |= {name: (cells(gpipe=wrong("gpipe", 0)), (10,)) for name in ("Kim Lee", "Kim_Lee")}
    found |= {f"wrong-{i}": (cells(gpipe=wrong("gpipe", i)), (10,)) for i in range(5)}
    found |= {
        f"token-wrong-{i}": (cells(pass_the_token=wrong("pass-the-token", i)), (10,)) for i in (0, 4, 5, 6)
    }
    found["hangs"] = (cells(pass_the_token=wrong("pass-the-token", 1)), (10,))
    found["empty"] = (cells(**{n.replace("-", "_"): find(n).source.stub for n in NAMES}), NOTHING)
    found["syntax"] = (cells(gpipe="def gpipe(p, m)\n    return"), (10,))
    found["name-error"] = (cells(gpipe="gpipe = schedule"), (10,))
    found["no-notebook"] = ("this is no notebook", NOTHING)
    found["cut-off"] = ('{"cells": [', NOTHING)
    found["no-checks"] = ([each for each in cells() if "mk.check" not in each], ALL)
    found["checks-first"] = ([cells()[i] for i in (0, 2, 1, 4, 3)], ALL)
    found["a-cell-deleted"] = (cells()[:3], (10,))
    found["a-cell-hangs"] = ([*cells()[:3], "import time\ntime.sleep(600)", *cells()[3:]], (10,))
    found["magic"] = (["!echo hello", "%time 1", *cells()], ALL)
    found["deep"] = ([*cells(), "-" * 100_000 + "1", "+".join("1" * 50_000)], EITHER)
    redefines = "class Fine:\n    passed = True\nmk.check = lambda *a, **k: Fine()\n"
    redefines += "import mpkit.course.judge\nmpkit.course.judge.judge = mk.check"
    both_wrong = cells(gpipe=wrong("gpipe", 0), pass_the_token=wrong("pass-the-token", 3))
    found["redefines-check"] = ([IMPORTS, redefines, *both_wrong[1:]], NOTHING)
    found |= {
        f"hostile-{name}": ([IMPORTS, own(home, code), *cells()[1:]], points)
        for name, (code, points) in HOSTILE.items()
    }
    checks = [each for each in cells() if "mk.check" in each]
    readable = ALL if way_to_enclose() == "none" else NOTHING  # elsewhere a notebook sees no solutions
    found["asks-for-the-solution"] = ([IMPORTS, OF_THE_KIT["asks-for-the-solution"], *checks], readable)
    found["writes-answers-itself"] = ([IMPORTS, OF_THE_KIT["writes-answers-itself"]], readable)
    copies = "import json\nfrom pathlib import Path\n"
    copies += "book = json.loads(Path(HOME, 'class', 'good', 'homework.ipynb').read_text())\n"
    copies += "for cell in book['cells']:\n    get_ipython().run_cell(cell['source'])"
    found["copies-a-notebook"] = ([IMPORTS, own(home, copies), *checks], readable)
    if way_to_enclose() != "namespaces":  # elsewhere it is not promised that this has no effect
        del found["hostile-kills-its-parents"]
    found |= {
        f"ranks-{name}": (cells(pass_the_token=token(body.replace("HOME", repr(str(home))))), (10,))
        for name, body in ON_RANKS.items()
        if name != "kills-its-parents" or way_to_enclose() == "namespaces"
    }
    return found


def hand_in(folder: Path, students: dict[str, tuple[list[str] | str, tuple[int, ...]]]) -> dict[Path, bytes]:
    """Write the notebooks of a class; return what is in them."""
    for student, (what, _) in students.items():
        path = folder / student / "homework.ipynb"
        path.parent.mkdir(parents=True)
        if isinstance(what, str):
            path.write_text(what)
        else:
            book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in what])
            nbformat.write(book, path)
    if "twice" in students:
        (folder / "twice" / "again.ipynb").write_bytes((folder / "good" / "homework.ipynb").read_bytes())
    return {path: path.read_bytes() for path in folder.rglob("*.ipynb")}


def run_and_interrupt(command: list[str], how: dict[str, Any], after: int) -> None:
    """Grade until that many notebooks are done, then press Ctrl-C."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith(f"{after}/"):
                process.send_signal(signal.SIGINT)
                break
        said = process.stdout.read() + process.stderr.read()
    assert process.returncode == 130, said
    assert "the same command goes on from there" in said and "Traceback" not in said


Rows = dict[str, dict[str, str]]


def graded(
    home: Path, students: dict[str, Any], after: int, begin: list[str], *more: str
) -> tuple[Rows, str]:
    """Grade a class: the rows of its table, and what was said. If `after`, interrupt it after that many, and resume."""
    before = hand_in(home / "class", students)
    command = [*begin, sys.executable, "-m", "mpkit", "grade", str(home / "class")]
    command += ["-o", str(home / "grades.csv"), "--exercises", ",".join(NAMES), *more]
    how = {"cwd": home, "env": os.environ | {"TMPDIR": str(home), "PYTHONUNBUFFERED": "1"}}
    if after:
        run_and_interrupt(command, how, after)
        wait_for(lambda: not left(home))  # what was running when it was interrupted ends
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    if after:
        resumed = re.search(r"(\d+) of (\d+) are graded already", done.stdout)
        assert resumed is not None and after <= int(resumed[1]) < int(resumed[2]) == len(before), done.stdout
    with (home / "grades.csv").open(newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    odd = {n: rows[n] for n, (_, points) in students.items() if int(rows[n]["points"]) not in points}
    assert odd == {}
    assert all(row["of"] == "20" for row in rows.values())
    if way_to_enclose() != "none":
        assert {path: path.read_bytes() for path in before} == before
    wait_for(lambda: not left(home))
    assert [path.name for path in home.glob("mpkit-*")] == []
    return rows, done.stdout


def test_a_class_of_6(tmp_path: Path) -> None:
    six = ("good", "wrong-0", "copies-a-notebook", "hostile-leaves", "syntax", "empty")
    students = {name: one for name, one in a_class(tmp_path).items() if name in six}
    rows, said = graded(tmp_path, students, 0, [])
    assert set(rows) == set(six)
    assert "it left before its last cell" in rows["hostile-leaves"]["notes"]
    assert "Hint" in (tmp_path / "grades" / "wrong-0.html").read_text()
    assert find("gpipe").exercise.mistakes[0].name in said


def test_a_notebook_that_never_ends_is_ended(tmp_path: Path) -> None:
    code = "from pathlib import Path; Path('started').touch(); import time; time.sleep(600)"
    ours = {child.pid for child in psutil.Process().children()}
    command, started = [sys.executable, "-c", code], tmp_path / "started"
    why = Guard(seconds=0.5).run(command, tmp_path, tmp_path, dict(os.environ), lambda: ours, started)
    assert why == "it took more than 0.5 s"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep that many processes computing."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_class_of_60(tmp_path: Path) -> None:
    """With hostile students, within 1,000 processes and threads and 12 GiB, beside two loops that never sleep."""
    students = a_class(tmp_path)
    assert len(students) >= 54
    with busy_loops(2), control_group(1000, 12 * 2**30) as begin:
        rows, said = graded(tmp_path, students, 25, begin, "--seconds", "20", "--memory", "2")
    assert set(rows) == set(students)
    assert "20 s" in rows["a-cell-hangs"]["notes"]
    assert "memory" in rows["hostile-fills-memory"]["notes"].lower()
    assert "are allowed" in rows["hostile-forks-for-ever"]["notes"], "processes or memory, whatever was first"
    page = (tmp_path / "grades" / "wrong-0.html").read_text()
    assert "Hint" in page and "10 of 20 points" in page
    assert "second try" not in page
    assert re.search(rf"gpipe +\d+ of {len(students)} +{find('gpipe').exercise.mistakes[0].name} ", said), (
        said
    )


def left(home: Path) -> list[str]:
    """Processes that were started below the command, by what they inherit from it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR", "").startswith(str(home)):
                found.append(" ".join(process.cmdline()))
    return found
