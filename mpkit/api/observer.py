"""Observer: an object that is notified as a run proceeds, such as a view of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mpkit.api.run import Run

__all__ = ["Observer"]


class Observer(Protocol):
    """An object that follows a run; its methods are called from the run's own thread."""

    def tick(self, run: Run) -> None:
        """Handle a periodic notification: something may have changed."""

    def output(self, line: str) -> None:
        """Handle a line that a rank printed."""

    def end(self, run: Run) -> None:
        """Handle the end of the run: it finished, was stopped, or failed."""
