"""The code of docs/which-call.md runs as it stands there, and so does the call of each row of its table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import PROGRAM

PAGE = Path(__file__).parent.parent / "docs" / "which-call.md"


@pytest.mark.soak
def test_the_code_runs(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    calls = re.findall(r"^\| [^|]+\? \| `([^`]+)` \|", text, re.MULTILINE)
    assert len(calls) >= 15
    rows = [f"print('answer', {number}, repr({call}))" for number, call in enumerate(calls)]
    (tmp_path / "page.py").write_text("\n".join([first, *rows, second]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=PROGRAM,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("answer") >= len(calls)
