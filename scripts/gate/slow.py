"""`python -m scripts.gate.slow RECORD.jsonl ... > tests/slow.txt`: the tests that `make test` leaves out.

They are the slowest ones of a gate's records (`.ci/out` in its clone), until what is left takes `SECONDS`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.gate.report import read

SECONDS = 450.0
"""Of tests, one after another: under five minutes on two workers, their start included."""


def slowest(records: Sequence[Path]) -> list[str]:
    """Return the names of the slowest tests, sorted, such that all others take at most `SECONDS`."""
    tests = sorted(read(*records).values(), key=lambda test: test.seconds)
    total, kept = 0.0, 0
    for test in tests:
        total += test.seconds
        kept += total <= SECONDS
    return sorted(test.id for test in tests[kept:])


if __name__ == "__main__":
    print(*slowest([Path(name) for name in sys.argv[1:]]), sep="\n")
