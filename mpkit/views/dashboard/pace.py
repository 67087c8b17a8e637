"""Do expensive things only now and then, or in another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Background", "Pace"]

T = TypeVar("T")


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
