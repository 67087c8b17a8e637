"""Exceptions that mpkit catches and quotes, and the reports on them.

A model, a loss or an optimizer may raise anything when mpkit tries it: on tensors without content, in another
precision, on a few samples. If training can go on, a report tells the user what was caught, what is therefore unknown,
and what follows. Only code that names its expected exceptions may say nothing.
"""

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
    """Return an exception's message; if the user's own class raises in `__str__`, say so."""
    try:
        return str(error)
    except Exception as worse:
        return f"(its __str__ raises {type(worse).__name__})"


def report(message: str) -> None:
    """Warn at the user's line, with an `UnwisePlan`, of what was caught and what follows from it."""
    warnings.warn(message, UnwisePlan, stacklevel=level_of_user())
