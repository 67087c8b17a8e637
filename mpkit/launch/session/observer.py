"""Observers: objects that are notified as a run proceeds, such as views of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from mpkit.launch.process.output import flush_stdout

if TYPE_CHECKING:
    from mpkit.launch.session.run import Run

__all__ = ["Observer", "Observers"]


class Observer(Protocol):
    """An object that follows a run; its methods are called from the run's own thread."""

    def tick(self, run: Run) -> None:
        """Handle a periodic notification: something may have changed."""

    def output(self, line: str) -> None:
        """Handle a line that a rank printed."""

    def end(self, run: Run) -> None:
        """Handle the end of the run: it finished, was stopped, or failed."""


class Observers:
    """The observers of one run; without any, what the ranks print is printed.

    Args:
        observers: the first ones.

    Attributes:
        telling: held while observers are notified or added.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        self.telling = threading.RLock()

    def add(self, observer: Observer) -> None:
        """Notify an observer of everything from now on."""
        with self.telling:
            self._observers.append(observer)

    def tell(self, what: str, value: Any) -> None:
        """Notify every observer; one that raises is removed, and the run goes on.

        Args:
            what: the method of `Observer` to call.
            value: its argument.
        """
        with self.telling:
            for observer in list(self._observers):
                try:
                    getattr(observer, what)(value)
                except Exception as error:
                    self._observers.remove(observer)
                    trouble = f"{type(error).__name__}: {error}"
                    with suppress(OSError, ValueError):  # standard error may be closed
                        print(
                            f"mpkit: a view of the run stopped ({trouble}); the run goes on", file=sys.stderr
                        )

    def output(self, line: str) -> None:
        """Pass on a line that a rank printed."""
        if self._observers:
            self.tell("output", line)
        else:
            print(line)

    def flush(self) -> None:
        """Let lines that were printed appear."""
        if not self._observers:
            flush_stdout()
