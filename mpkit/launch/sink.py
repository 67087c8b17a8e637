"""Sink: where the ranks' output goes, line by line; ranks go on where it fails."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable

__all__ = ["Sink"]


class Sink:
    """Passes lines on until that fails.

    Args:
        line: receives a line.
        flush: called after lines have been passed on.

    Attributes:
        broken: the error if nothing reads this program's output any more.
    """

    def __init__(self, line: Callable[[str], None], flush: Callable[[], None]) -> None:
        self._line, self._flush = line, flush
        self._fails = False
        self.broken: BrokenPipeError | None = None

    def show(self, lines: Iterable[str]) -> None:
        """Pass lines on, and flush if any was passed on."""
        shown = False
        for line in lines:
            shown = self._try(self._line, line) or shown
        if shown:
            self._try(self._flush)

    def _try(self, tell: Callable[..., None], *what: str) -> bool:
        """Return whether this succeeded; after a failure nothing is passed on any more."""
        if self._fails:
            return False
        try:
            tell(*what)
        except Exception as error:
            self._fails = True
            if isinstance(error, BrokenPipeError):
                self.broken = error
            else:
                with contextlib.suppress(
                    OSError, ValueError, AttributeError
                ):  # standard error may be closed as well
                    print(
                        "mpkit: what the ranks print cannot be shown any more "
                        f"({type(error).__name__}: {error}); they go on",
                        file=sys.stderr,
                    )
            return False
        return True
