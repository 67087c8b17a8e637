"""The few exceptions that mpkit raises besides `ValueError`.

A `ValueError` is a mistake in a call, found before anything started. The classes here are for what can go
wrong while ranks run, or with a file that they left; and there is one warning.
"""

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ArgumentError",
    "CommMismatch",
    "Deadlock",
    "MpkitError",
    "NeedsTorch",
    "NotSerial",
    "RankFailed",
    "TraceError",
    "UnknownName",
    "UnwisePlan",
]


class MpkitError(Exception):
    """The base class of the kit's own exceptions."""


class ArgumentError(TypeError, ValueError):
    """A call lacks a required argument or has an unknown one; the message shows a call to paste."""


class UnknownName(MpkitError, AttributeError):
    """mpkit has no such name at its top; the message names the nearest."""


class NeedsTorch(MpkitError, ImportError):
    """A call trains, or reads a model, and this Python has no PyTorch; the message says what works without it."""


class UnwisePlan(UserWarning):
    """A plan works but costs more than another that does the same; the message says how much more, and which.

    It also warns of a plan under which the model's buffers differ slightly from those of serial training; and of what
    could not be checked before the ranks start, since the model, the loss or the optimizer raises something there: the
    message quotes it and says what follows.
    """


class TraceError(MpkitError):
    """A file is not a trace, is of another version, or is damaged beyond reading."""


class NotSerial(MpkitError):
    """A step of a run is not that of serial training; the message says what differs, the likely cause and what works.

    Attributes:
        step: the step, counted from 1.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class RankFailed(MpkitError):
    """A rank raised, was killed, or never returned.

    Attributes:
        rank: the first rank that failed (None if all wait for each other).
        step, stage, microbatch: where it failed; each is None if it does not apply.
        traceback: that rank's own traceback as text ("" if it was killed).
        signal: the name of the signal that ended it, such as "SIGKILL", or None.
        memory: the bytes that the rank held by category, if it ran out of memory; else None.
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
        memory: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.stage = stage
        self.microbatch = microbatch
        self.traceback = traceback
        self.signal = signal
        self.memory = memory


class Deadlock(RankFailed):
    """The ranks wait for each other forever; the message says which rank waits where, and which never arrived."""


class CommMismatch(RankFailed):
    """Two ranks' calls of one communication do not match; the message names both, their lines and what would work.

    Attributes:
        rank: the rank that noticed.
        other: the rank whose call does not match.
    """

    def __init__(self, message: str, *, rank: int, other: int, **where: Any) -> None:
        super().__init__(message, rank=rank, **where)
        self.other = other
