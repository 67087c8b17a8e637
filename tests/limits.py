"""How long tests wait for what must happen.

Only a test that fails waits this long, so the limits are generous. `MPKIT_TEST_LIMITS=3` triples all of them, for a
slow machine. That something is quick is shown by a benchmark, never by a limit.
"""

import os
import select
import time
from collections.abc import Callable, Iterable

SCALE = float(os.environ.get("MPKIT_TEST_LIMITS", "1"))
"""The factor of every limit, pytest's own included."""

EVENT = 60.0 * SCALE
"""Seconds for one event: a process ends, a file appears, a page shows a word."""

PROGRAM = 240.0 * SCALE
"""Seconds for a whole program: an interpreter that imports torch, trains and ends."""


def wait_until_gone(pids: Iterable[int], seconds: float = EVENT) -> None:
    """Wait until none of the processes runs; a zombie does not run.

    Raises:
        AssertionError: one of them still runs after `seconds`.
    """
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([process], [], [], max(deadline - time.monotonic(), 0.0))
        finally:
            os.close(process)
        assert ended, f"process {pid} still runs after {seconds:g} s"


def wait_for(condition: Callable[[], object], seconds: float = EVENT, pause: float = 0.01) -> None:
    """Wait until `condition()` is true, looking a hundred times per second, or with another `pause`.

    Raises:
        AssertionError: it is still false after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {seconds:g} s"
        time.sleep(pause)
