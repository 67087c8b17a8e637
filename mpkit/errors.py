"""The few exceptions that mpkit raises besides `ValueError`.

A `ValueError` is a mistake in what was asked, found before anything started. The classes here are what
can go wrong while ranks run, or with a file that they left; and one warning.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentError",
    "CommMismatch",
    "Deadlock",
    "MpkitError",
    "RankFailed",
    "TraceError",
    "UnwisePlan",
]


class MpkitError(Exception):
    """Base of the kit's own exceptions."""


class ArgumentError(TypeError, ValueError):
    """A call without an argument that is needed, or with one that there is not; the message has a call to paste."""


class UnwisePlan(UserWarning):
    """A plan that works, and costs more than another that does the same; the message says how much, and which.

    Or one by which the model's buffers are not quite those of serial training.
    """


class TraceError(MpkitError):
    """A trace file that is not one, is of another version, or is broken beyond reading."""


class RankFailed(MpkitError):
    """A rank raised, was killed, or never returned.

    Attributes:
        rank: the first rank that failed (None if all wait for each other).
        step, stage, microbatch: where it was, each None where it does not apply.
        traceback: that rank's own traceback as text ("" if it was killed).
        signal: the name of the signal that ended it, such as "SIGKILL", or None.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        traceback: str = "",
        signal: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.stage = stage
        self.microbatch = microbatch
        self.traceback = traceback
        self.signal = signal


class Deadlock(RankFailed):
    """The ranks wait for each other for ever; the message says who waits where, and who never came."""


class CommMismatch(RankFailed):
    """Two ranks' calls of one communication do not fit; the message names both, their lines and what would work.

    Attributes:
        rank: the one that noticed.
        other: the one whose call its own does not fit.
    """

    def __init__(self, message: str, *, rank: int, other: int, **where: Any) -> None:
        super().__init__(message, rank=rank, **where)
        self.other = other
