"""Doing costly things now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Pace"]


class Pace:
    """Calls at most once in `pause` seconds, and for at most a twentieth of the time.

    So what costs more the longer a run is comes less often, and never holds the run's picture up.

    >>> pace, calls = Pace(60.0), []
    >>> pace(lambda: calls.append(1)), pace(lambda: calls.append(2)), calls
    (True, False, [1])
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._next = 0.0

    def __call__(self, act: Callable[[], object]) -> bool:
        """Do it if it is time to; returns whether it was."""
        start = time.monotonic()
        if start < self._next:
            return False
        act()
        end = time.monotonic()
        self._next = end + max(self._pause, 20 * (end - start))
        return True
