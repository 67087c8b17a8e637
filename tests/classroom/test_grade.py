"""Grading a class: each notebook gets its own grade, whatever the others do, and nothing is left behind."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from contextlib import suppress
from inspect import cleandoc
from pathlib import Path

import nbformat
import psutil
import pytest

from mpkit.classroom.catalogue import find
from mpkit.classroom.source import IMPORTS

NAMES = ("pass-the-token", "gpipe")

HOSTILE = {
    "redefines-check": """
        class Fine:
            passed = True
        mk.check = lambda *a, **k: Fine()
        import mpkit.classroom.judge
        mpkit.classroom.judge.judge = mk.check
        """,
    "leaves": """
        import os
        os._exit(0)
        """,
    "fills-memory": """
        held = []
        while True:
            held.append(bytearray(2**26))
        """,
    "forks-a-daemon": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        """,
    "kills-its-siblings": """
        import os, signal
        for pid in os.popen(f"pgrep -P {os.getppid()}").read().split():
            if int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGKILL)
        """,
    "writes-for-ever": """
        while True:
            print("x" * 10**6)
        """,
}
ON_RANKS = {  # in an answer: on the ranks of its check
    "exits-on-a-rank": "import os\n    os._exit(0)",
    "fills-a-rank": "held = []\n    while True: held.append(bytearray(2**26))",
    "loops-on-a-rank": "while True: pass",
    "kills-the-nursery": "import os, signal\n    os.kill(os.getppid(), signal.SIGKILL)",
    "returns-a-bomb": "return type('Bomb', (), {'__reduce__': lambda self: (print, ('boom',))})()",
}


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
    return entry.source.wrong(entry.exercise.mistakes[number % len(entry.exercise.mistakes)])


def token(body: str) -> str:
    """An answer to pass-the-token that does that."""
    return f"def pass_the_token(ctx, token):\n    {body}\n"


def a_class() -> dict[str, tuple[list[str] | str, int]]:
    """40 students: what each hands in, and the points for it."""
    found: dict[str, tuple[list[str] | str, int]] = {f"good-{i}": (cells(), 20) for i in range(10)}
    found |= {f"wrong-{i}": (cells(gpipe=wrong("gpipe", i)), 10) for i in range(6)}
    found |= {f"hangs-{i}": (cells(pass_the_token=wrong("pass-the-token", i % 2)), 10) for i in range(3)}
    found |= {
        f"empty-{i}": (cells(**{n.replace("-", "_"): find(n).source.stub for n in NAMES}), 0)
        for i in range(2)
    }
    found["syntax"] = (cells(gpipe="def gpipe(p, m)\n    return"), 10)
    found["name-error"] = (cells(gpipe="gpipe = schedule"), 10)
    found["no-notebook"] = ("this is no notebook", 0)
    found["cut-off"] = ('{"cells": [', 0)
    found["no-checks"] = ([each for each in cells() if "mk.check" not in each], 20)
    found["a-cell-deleted"] = (cells()[:3], 10)
    found["a-cell-hangs"] = ([*cells()[:3], "import time\ntime.sleep(600)", *cells()[3:]], 10)
    found["magic"] = (["%matplotlib inline", "!echo hello", *cells()], 20)
    found |= {
        f"hostile-{name}": ([IMPORTS, cleandoc(code), *cells()[1:]], 0) for name, code in HOSTILE.items()
    }
    both_wrong = cells(gpipe=wrong("gpipe", 0), pass_the_token=wrong("pass-the-token", 3))
    found["hostile-redefines-check"] = ([IMPORTS, cleandoc(HOSTILE["redefines-check"]), *both_wrong[1:]], 0)
    for name in ("forks-a-daemon", "kills-its-siblings"):  # what they answer is right
        found[f"hostile-{name}"] = ([IMPORTS, cleandoc(HOSTILE[name]), *cells()[1:]], 20)
    found |= {f"ranks-{name}": (cells(pass_the_token=token(body)), 10) for name, body in ON_RANKS.items()}
    return found


@pytest.mark.timeout(1200)
def test_a_class_of_40(tmp_path: Path) -> None:
    students = a_class()
    assert len(students) == 40
    folder = tmp_path / "class"
    for student, (what, _) in students.items():
        path = folder / student / "homework.ipynb"
        path.parent.mkdir(parents=True)
        if isinstance(what, str):
            path.write_text(what)
        else:
            book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in what])
            nbformat.write(book, path)
    command = [sys.executable, "-m", "mpkit", "grade", str(folder), "-o", str(tmp_path / "grades.csv")]
    command += ["--exercises", ",".join(NAMES), "--seconds", "20", "--memory", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "grades.csv").open(newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert {name: int(row["points"]) for name, row in rows.items()} == {
        n: p for n, (_, p) in students.items()
    }
    assert all(row["of"] == "20" for row in rows.values())
    assert "20 s" in rows["a-cell-hangs"]["notes"]
    assert "memory" in rows["hostile-fills-memory"]["notes"].lower()
    page = (tmp_path / "grades" / "wrong-0.html").read_text()
    assert "Hint" in page and "10 of 20 points" in page
    assert left(tmp_path) == []
    assert [path.name for path in tmp_path.glob("mpkit-*")] == []


def left(home: Path) -> list[str]:
    """Processes that were started below the command, by what they inherit from it; given a moment to end."""
    deadline = time.monotonic() + 10
    while True:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(home):
                    found.append(" ".join(process.cmdline()))
        if not found or time.monotonic() > deadline:
            return found
