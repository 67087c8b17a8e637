"""The code of docs/wrappers.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import PROGRAM

PAGE = Path(__file__).parents[2] / "docs" / "wrappers.md"


@pytest.mark.soak
def test_the_code_runs(tmp_path: Path) -> None:
    parts = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(parts) == 4
    (tmp_path / "page.py").write_text("".join(parts), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=PROGRAM,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("ddp", "fully_sharded", "in_fp16"):
        assert name in done.stdout
    assert done.stdout.count("bubble") == 4
