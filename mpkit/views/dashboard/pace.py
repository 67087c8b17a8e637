"""Time in a live view: how long a run still takes; expensive things only now and then, or in another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Background", "Pace", "TimeLeft"]

T = TypeVar("T")


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


class Background(Generic[T]):
    """Processes the latest value it was given, in a thread of its own.

    Of the values given while it is at work, only the latest is processed next.

    >>> done: list[int] = []
    >>> worker = Background(done.append)
    >>> worker.put(1)
    >>> worker.join(), done
    (True, [1])
    """

    def __init__(self, act: Callable[[T], object]) -> None:
        self._act = act
        self._idle = threading.Condition()
        self._waiting: list[T] = []
        self._works = False

    def put(self, value: T) -> None:
        """Process this value soon."""
        with self._idle:
            self._waiting = [value]
            if not self._works:
                self._works = True
                threading.Thread(target=self._work, name="mpkit-background", daemon=True).start()

    def join(self, timeout: float = 30.0) -> bool:
        """Wait until there is nothing more to do; returns whether that was reached in time."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._works, timeout)

    def _work(self) -> None:
        while True:
            with self._idle:
                if not self._waiting:
                    self._works = False
                    self._idle.notify_all()
                    return
                value = self._waiting.pop()
            try:
                self._act(value)
            except BaseException:
                with self._idle:
                    self._works = False
                    self._idle.notify_all()
                raise
