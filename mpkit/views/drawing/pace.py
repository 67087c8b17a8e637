"""How often a view of a run is made, and how long the run still takes."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Pace", "TimeLeft"]


class TimeLeft:
    """How long a run still takes, if its steps go on as they have since the first one that was seen to end.

    >>> now = iter([10.0, 14.0])
    >>> left = TimeLeft(steps=7, clock=lambda: next(now))
    >>> [left.estimate_after(step) for step in (1, 3, 7)]  # 2 s per step, and 4 more steps; then none
    [None, 8.0, None]

    Args:
        steps: the number of the run's steps; None if it is not known.
        clock: returns seconds.
    """

    def __init__(self, steps: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._first: tuple[int, float] | None = None

    def estimate_after(self, step: int) -> float | None:
        """Return the seconds that are left when so many steps are done; None where nothing can be said."""
        if self._steps is None or not 0 < step < self._steps:
            return None
        if self._first is None:
            self._first = step, self._clock()
            return None
        first, began = self._first
        return (self._clock() - began) / (step - first) * (self._steps - step) if step > first else None


class Pace:
    """Calls at most once per `pause` seconds, and for at most a twentieth of the time.

    Work that gets more expensive the longer a run takes is therefore done less often, and never delays the run's
    picture. The first call is due `first` seconds from now.

    >>> pace, calls = Pace(60.0), []
    >>> pace(lambda: calls.append(1)), pace(lambda: calls.append(2)), calls
    (True, False, [1])
    """

    def __init__(self, pause: float, first: float = 0.0) -> None:
        self._pause = pause
        self._next = time.monotonic() + first

    def __call__(self, act: Callable[[], object]) -> bool:
        """Call `act` if it is due; returns whether it was called."""
        start = time.monotonic()
        if start < self._next:
            return False
        act()
        end = time.monotonic()
        self._next = end + max(self._pause, 20 * (end - start))
        return True
