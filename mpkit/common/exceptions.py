"""Exceptions that do not end what they were raised in: how they are quoted, and how they are reported.

A model, a loss or an optimizer may raise anything where mpkit tries it: on tensors without content, in another
precision, on a few samples. Where training can go on all the same, the user is told what was caught, what is unknown
because of it, and what follows (`report`). Only what names the exceptions that it expects may say nothing.
"""

from __future__ import annotations

import warnings

from mpkit.common.tracebacks import level_of_user
from mpkit.errors import UnwisePlan


def one_line(error: BaseException) -> str:
    """Return an exception's type and message in one line, without the traceback.

    >>> one_line(KeyError("scale")), one_line(ValueError())
    ("KeyError: 'scale'", 'ValueError: no reason given')
    """
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines[0] if lines else 'no reason given')[:300]}"


def message_of(error: BaseException) -> str:
    """Return an exception's message; what is wrong with it where its class, the user's own, cannot tell."""
    try:
        return str(error)
    except Exception as worse:
        return f"(its __str__ raises {type(worse).__name__})"


def report(message: str) -> None:
    """Warn at the user's line, with an `UnwisePlan`, of what was caught and what follows from it."""
    warnings.warn(message, UnwisePlan, stacklevel=level_of_user())
