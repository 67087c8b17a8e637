"""What an exercise asks to write by hand raises where an answer calls the library's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from mpkit.classroom.framework.exercise import Mistake

__all__ = ["calls_the_library", "checkpoint_by_hand"]

WHY = "torch.utils.checkpoint is what this exercise asks you to write"


def calls_the_library(wrong: str) -> Mistake:
    """Return the mistake of an answer, `wrong`, that calls torch.utils.checkpoint."""
    return Mistake(
        name="calls-the-library",
        hints=(
            "torch.utils.checkpoint does what you are to write. What does it keep, and when does it compute again?",
            "It keeps the input and where the random numbers were, runs forward without a graph, and once more, with "
            "one, when the backward comes. Write these three steps.",
        ),
        wrong=wrong,
        when=lambda seen: WHY in seen.error,
    )


class _Refused:
    """In place of what `torch.utils.checkpoint.checkpoint` calls, in both of its ways."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(WHY)

    apply = __call__


@contextmanager
def checkpoint_by_hand() -> Iterator[None]:
    """Let torch.utils.checkpoint raise, however an answer has imported it.

    >>> import torch
    >>> with checkpoint_by_hand():
    ...     torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(1), use_reentrant=False)
    Traceback (most recent call last):
    RuntimeError: torch.utils.checkpoint is what this exercise asks you to write
    """
    module = "torch.utils.checkpoint"
    with ExitStack() as stack:
        for name in ("CheckpointFunction", "_checkpoint_without_reentrant_generator"):
            stack.enter_context(patch(f"{module}.{name}", _Refused()))
        yield
