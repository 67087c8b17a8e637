"""Which of many cases of an exercise are tried in the gate; the others are soak."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from mpkit.course.catalogue import ExerciseEntry

CLASSROOM = "mpkit/course/"
JUDGING = [f"{CLASSROOM}{part}" for part in ("exercises", "framework", "lab", "judge.py")]


def git(*words: str) -> str:
    """What git says of this checkout; "" without git."""
    try:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""


HEAD = git("rev-parse", "HEAD").strip()
PASSED = os.environ.get("MPKIT_PASSED")
"""The last commit that passed the gate."""
CHANGED = (
    git("diff", "--name-only", PASSED, "--", *(f":/{path}" for path in JUDGING)).split() if PASSED else []
)


def marks(entry: ExerciseEntry, case: str) -> list[pytest.MarkDecorator]:
    """Nothing for a quarter of the cases, drawn by the last commit, and for all those of an exercise that has changed
    since `PASSED`, or of all if what judges them has; soak for the others. All workers of xdist draw the same."""
    family = f"{CLASSROOM}exercises/{entry.family}/"
    own = (f"{family}{entry.name.replace('-', '_')}.py", f"{family}__init__.py")
    if any(path in own or not path.startswith(JUDGING[0]) for path in CHANGED):
        return []
    drawn = hashlib.sha1(f"{HEAD} {entry.name} {case}".encode()).digest()[0] % 4 == 0
    return [] if drawn else [pytest.mark.soak]
