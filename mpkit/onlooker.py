"""Onlooker: what is told how a run goes, such as a view of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mpkit.run import Run

__all__ = ["Onlooker"]


class Onlooker(Protocol):
    """Whoever looks on while a run goes; called from the run's own thread."""

    def tick(self, run: Run) -> None:
        """Something may have changed."""

    def output(self, line: str) -> None:
        """A rank printed this line."""

    def end(self, run: Run) -> None:
        """It is over: finished, stopped or failed."""
