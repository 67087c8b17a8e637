"""What else runs because of what a change touches, by `git diff` against the last commit known to have passed.

That commit is in `.ci/passed`. A session that starts from a commit that has landed writes it there; an older commit is
safe, since more is then touched.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Touched", "changed_files", "last_passed", "touched"]

EXAM = ("scripts/exam/", "mpkit/course/catalogue.py", "mpkit/course/answer_status.py")
CLASSROOM = r"(mpkit/course|tests/classroom)/|notebooks/exercises/|scripts/gate/|pyproject.toml"
SYSTEMS = (
    r"mpkit/(launch/watch|plan/formats|strategies/program_calls)/|"
    r"examples/systems/|tests/systems/|scripts/systems\.sh"
)


@dataclass(frozen=True)
class Touched:
    """What a change touches: whole tests by path or id, and whether programs of other systems and the classroom run."""

    tests: tuple[str, ...]
    systems: bool
    classroom: bool


def last_passed(root: Path) -> str | None:
    """Return the commit in `.ci/passed`, or None if this clone does not have it."""
    commit = (root / ".ci/passed").read_text(encoding="utf-8").strip()
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=root, stderr=subprocess.DEVNULL
    )
    return commit if known.returncode == 0 else None


def changed_files(root: Path, since: str | None) -> list[str]:
    """Return the files that differ from the commit; all files where it is not known."""
    command = ["git", "diff", "--name-only", since] if since else ["git", "ls-files"]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()


def touched(root: Path, changed: list[str]) -> Touched:
    """Return what the changed files touch.

    >>> touched(Path("."), ["README.md", "mpkit/launch/watch/span.py"])
    Touched(tests=('tests/test_readme.py',), systems=True, classroom=False)
    """
    tests = {name for name in changed if re.fullmatch(r"notebooks/(exercises/solved/)?[\w-]+\.ipynb", name)}
    tests = {name for name in tests if (root / name).exists()}
    exact = re.compile(r"notebooks/([\w-]+)\.ipynb")
    tests |= {
        f"tests/test_tutorials.py::test_fast_cells_run[{m[1]}]" for m in map(exact.fullmatch, tests) if m
    }
    if {"README.md", "docs/strategies.md"} & set(changed):
        tests.add("tests/test_readme.py")
    if any(name.startswith(EXAM) for name in changed):
        tests.add("tests/classroom/test_exam.py")
    systems, classroom = (any(re.match(each, name) for name in changed) for each in (SYSTEMS, CLASSROOM))
    return Touched(tuple(sorted(tests)), systems, classroom)
