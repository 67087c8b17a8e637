"""The code of the README runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_every_file_that_it_names_is_there() -> None:
    text = README.read_text()
    for name in re.findall(r"\]\((?!http)([^)#]+)\)|`((?:docs|notebooks|benchmarks|mpkit)/[\w./-]*)`", text):
        path = next(part for part in name if part)
        if path != "benchmarks/results.json":  # made by make bench
            assert (README.parent / path).exists(), path
