"""How often a view of a run is made."""

import time
from collections.abc import Callable


class Pace:
    """Calls at most once per `pause` seconds, and for at most a twentieth of the time.

    Work that gets more expensive the longer a run takes is therefore done less often, and never delays the run's
    picture. The first call is due `first` seconds from now.

    >>> pace, calls = Pace(60.0), []
    >>> pace(lambda: calls.append(1)), pace(lambda: calls.append(2)), calls
    (True, False, [1])
    >>> Pace(60.0, first=60.0)(print)
    False
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
