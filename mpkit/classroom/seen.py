"""What an answer did in one case: results by rank, or what kept it from having any, and the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpkit.classroom.equal import difference, mapped
from mpkit.classroom.exercise import Case
from mpkit.trace import Lane, Trace

if TYPE_CHECKING:
    from mpkit.schedule import Schedule
    from mpkit.timeline import Timeline

__all__ = ["Seen"]

MACHINE = "8x-a100-nvlink"
"""Whose clock answers are put on: the same for everybody."""


@dataclass(frozen=True)
class Seen:
    """What an answer did in one case.

    Attributes:
        case: which.
        expected: what each rank should have, by rank.
        got: what each rank has; None where the ranks did not finish.
        error: the error that a rank ended with, such as "IndexError: ..."; "" without.
        where: the line of the answer that raised it.
        mismatch: the same as `error`, where two ranks' calls of one communication do not fit; "" otherwise.
        hang: the report of who waits where, if they hang; "" otherwise.
        trace: what the ranks recorded.
        printed: lines that the ranks printed.
        schedule: the answer, where that is one.
        simulated: the schedule's timeline.
        budget: the budget that is exceeded, as `Budget.what`; "" if that is not what is wrong.
    """

    case: Case
    expected: Sequence[Any] = ()
    got: list[Any] | None = None
    error: str = ""
    where: str = ""
    mismatch: str = ""
    hang: str = ""
    trace: Trace | None = None
    printed: list[str] = field(default_factory=list)
    schedule: Schedule | None = None
    simulated: Timeline | None = None
    budget: str = ""

    @cached_property
    def timeline(self) -> Timeline:
        """On a machine of 8 GPUs, the same for everybody; of a schedule the simulated one."""
        if self.simulated is not None:
            return self.simulated
        from mpkit.replay import replay

        assert self.trace is not None, "nothing was recorded"
        return replay(self.trace, MACHINE)

    @property
    def finished(self) -> bool:
        """The ranks came to an end, and none failed."""
        return self.got is not None

    def close(self, wrong: Sequence[Any]) -> bool:
        """Whether the results are these, by rank."""
        return self.got is not None and difference(list(wrong), self.got) is None

    def like(self, other: Seen) -> bool:
        """Whether another answer did the same: its results, or where both are right, in how they came about."""
        if self.schedule is not None:
            return other.schedule is not None and self.schedule.rows == other.schedule.rows
        if not (self.finished and other.got is not None and self.close(other.got)):
            return False
        return not self.budget or self._shape() == other._shape()

    def _shape(self) -> list[list[tuple[int, int]]]:
        """By rank, which communication it did, in which order, of how many bytes."""
        assert self.trace is not None
        return [
            [(int(op["kind"]), int(op["bytes"])) for op in rank.ops if op["lane"] == Lane.COMM]
            for rank in self.trace.ranks
        ]

    def changed(self, change: Callable[[Any], Any]) -> bool:
        """Whether the results are the expected ones, with this done to each tensor or number.

        >>> import torch
        >>> Seen(Case(2), expected=[torch.ones(2)] * 2, got=[torch.full((2,), 2.0)] * 2).changed(lambda x: x * 2)
        True
        """
        return self.close([mapped(change, each) for each in self.expected])
