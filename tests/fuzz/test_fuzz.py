"""Each reader of files reads 10,000 damaged ones or refuses them with its one error, in bounded time and memory."""

import json
import subprocess
import sys

import pytest

from tests.fuzz.readers import READERS
from tests.limits import EVENT, PROGRAM

CASES, FEW = 10_000, 40


def fuzz(reader: str, cases: int) -> dict[str, int]:
    """Read damaged files in a process of its own, and return how many were read and refused."""
    command = [sys.executable, "-m", "tests.fuzz.worker", reader, "0", str(cases), str(EVENT)]
    limit = PROGRAM * (1 + cases / 1000)
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr[-5000:]
    return dict(json.loads(done.stdout))


@pytest.mark.soak
@pytest.mark.timeout(12 * PROGRAM)
@pytest.mark.parametrize("reader", READERS)
def test_ten_thousand_damaged_files(reader: str) -> None:
    came_of = fuzz(reader, CASES)
    assert came_of["read"] > 100, "no file was read: the test proves nothing"
    assert reader == "file of progress" or came_of["refused"] > 100


@pytest.mark.slow
def test_a_few_damaged_files() -> None:
    assert sum(fuzz("trace of a profiler", FEW).values()) == FEW
