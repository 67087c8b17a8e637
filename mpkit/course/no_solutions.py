"""What stands in place of the right values where mpkit was installed without solutions."""

from __future__ import annotations

from typing import Any, NoReturn

from mpkit.errors import MpkitError

__all__ = ["MISSING", "NoSolutions", "raise_missing"]

MISSING = (
    "this mpkit was made for an exam, and has no solutions: what is right, only grading says. Who grades installs "
    "mpkit-solutions too, which `make exam` builds beside it"
)


class NoSolutions(MpkitError):
    """The solutions of the exercises are not installed."""


def raise_missing(*_: Any) -> NoReturn:
    """Raise `NoSolutions`.

    >>> raise_missing()
    Traceback (most recent call last):
    mpkit.course.no_solutions.NoSolutions: this mpkit was made for an exam, and has no solutions: ...
    """
    raise NoSolutions(MISSING)
