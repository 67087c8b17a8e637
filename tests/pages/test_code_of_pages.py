"""The code of the README and of pages of docs/ runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import PROGRAM

ROOT = Path(__file__).parents[2]
PRINTED = {
    "README.md": {"bubble": 1},
    "docs/which-call.md": {"answer": 15},
    "docs/wrappers.md": {
        "bubble": 2,
        "mk.prove(DistributedDataParallel): equal": 1,
        "mk.prove(FSDPSequential): equal": 1,
    },
}
"""By page, how often its program prints a word at least."""


def program_of(page: str) -> str:
    """Return the code of a page; of the README the first block, of which-call.md also the call of each row."""
    text = (ROOT / page).read_text(encoding="utf-8")
    first, *others = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    calls = re.findall(r"^\| [^|]+\? \| `([^`]+)` \|", text, re.MULTILINE)
    rows = [f"print('answer', {number}, repr({call}))" for number, call in enumerate(calls)]
    return "\n".join([first, *rows, *([] if page == "README.md" else others)])


@pytest.mark.soak
@pytest.mark.parametrize("page", PRINTED)
def test_the_code_runs(tmp_path: Path, page: str) -> None:
    (tmp_path / "page.py").write_text(program_of(page), encoding="utf-8")
    command = [sys.executable, "page.py"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=PROGRAM)
    assert done.returncode == 0, done.stderr
    assert {word: done.stdout.count(word) >= least for word, least in PRINTED[page].items()} == dict.fromkeys(
        PRINTED[page], True
    )
