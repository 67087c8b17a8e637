"""Exceptions that do not end what they were raised in: how they are quoted, and how they are reported.

A model, a loss or an optimizer may raise anything where mpkit tries it: on tensors without content, in another
precision, on a few samples. Where training can go on all the same, the user is told what was caught, what is unknown
because of it, and what follows (`report`). Only what names the exceptions that it expects may say nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

from mpkit.common.tracebacks import level_of_user
from mpkit.errors import UnwisePlan

__all__ = ["fakes_or_real", "message_of", "needs_content", "one_line", "report"]

Result = TypeVar("Result")


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


def fakes_or_real(
    on_fakes: Callable[[], Result],
    on_real: Callable[[], Result],
    what: str,
    *,
    final: tuple[type[Exception], ...] = (),
) -> Result:
    """Return the result on fake tensors; if that fails, the result on real tensors, which is the authority.

    An error of the user's own is raised again on real tensors, and leaves this function. An error that only fake
    tensors raise is expected where it is for want of content (`needs_content`), and reported otherwise.

    Args:
        on_fakes, on_real: do the same on the two kinds of tensors.
        what: what is run, such as "the model"; the report begins with it.
        final: exceptions that are a result on fake tensors already.

    Raises:
        Exception: whatever `on_real` raises, and exceptions of the kinds `final`.
    """
    try:
        return on_fakes()
    except final:
        raise
    except Exception as error:
        failed = error
    result = on_real()
    if not needs_content(failed):
        report(
            f"{what} was computed for real before the ranks started, which takes time and memory: on tensors that "
            f"have shapes and no content it raises {one_line(failed)}."
        )
    return result


def needs_content(error: BaseException) -> bool:
    """Return whether an error is of the kinds that torch raises where fake tensors have no numbers to give.

    `item`, a branch on values and operators whose output's shape depends on values raise subclasses of RuntimeError
    (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException); so does access to memory.
    Conversions to Python's or NumPy's types, and dtypes that do not go together, raise TypeError. Any may have been
    replaced by an error of the model's own.
    """
    return any(isinstance(each, (RuntimeError, TypeError)) for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those during whose handling it was raised."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
