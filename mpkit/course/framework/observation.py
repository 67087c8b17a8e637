"""What an answer did in one case: its results by rank, or the reason why there are none, and the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.course.framework.equal import difference
from mpkit.course.framework.exercise import Case
from mpkit.trace import Lane, Trace

if TYPE_CHECKING:
    from mpkit.plan.schedule import Schedule
    from mpkit.timeline.timeline import Timeline

__all__ = ["Seen"]

MACHINE = "8x-a100-nvlink"
"""The machine on whose virtual clock answers are timed: the same for everybody."""


@dataclass(frozen=True)
class Seen:
    """What an answer did in one case.

    Attributes:
        case: the case.
        expected: the right results, by rank.
        got: the answer's results, by rank; None if the ranks did not finish.
        error: the error that a rank ended with, such as "IndexError: ..."; "" if there was none.
        where: the line of the answer that raised the error.
        mismatch: the same as `error` if two ranks' calls of one communication do not match; "" otherwise.
        hang: the report of which rank waits where, if the ranks hang; "" otherwise.
        trace: what the ranks recorded.
        printed: the lines that the ranks printed.
        schedule: the answer's schedule, if the answer is one.
        simulated: the schedule's simulated timeline.
        budget: the budget that is exceeded, as `Budget.what`; "" if none is.
        used: by rank, the FLOPs of its matrix products, and the most bytes that its tensors held.
        target: what the solution did in the same case; None if it did not run.
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
    used: Sequence[tuple[float, float]] = ()
    target: Seen | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline on a machine of 8 GPUs, the same for everybody; for a schedule, the simulated one."""
        if self.simulated is not None:
            return self.simulated
        from mpkit.timeline.timeline import Timeline

        assert self.trace is not None, "nothing was recorded"
        return Timeline.of(self.trace, MACHINE)

    @cached_property
    def waits(self) -> Timeline:
        """The timeline of ranks that hang, on their own clock: what they wait in goes on for as long as all before."""
        from mpkit.timeline.timeline import Timeline

        assert self.trace is not None, "nothing was recorded"
        times = np.concatenate([rank.ops[name] for rank in self.trace.ranks for name in ("start", "end")])
        times = times[times > 0]
        last = int(times.max() + max(times.max() - times.min(), 1_000_000))  # ns
        ranks = []
        for rank in self.trace.ranks:
            ops = rank.ops.copy()
            ops["end"][ops["end"] == 0] = last
            ranks.append(replace(rank, ops=ops))
        return Timeline.of(replace(self.trace, ranks=ranks), clock="measured")

    @property
    def is_finished(self) -> bool:
        """Whether all ranks finished without an error."""
        return self.got is not None

    def close(self, wrong: Sequence[Any]) -> bool:
        """Return whether the results are equal to these, by rank."""
        return self.got is not None and difference(list(wrong), self.got) is None

    def matches(self, other: Seen) -> bool:
        """Return whether another answer did the same: same results and, if a budget is exceeded, same communication."""
        if self.schedule is not None:
            return other.schedule is not None and self.schedule.rows == other.schedule.rows
        if not (self.is_finished and other.got is not None and self.close(other.got)):
            return False
        return not self.budget or self._shape() == other._shape()

    def _shape(self) -> list[list[tuple[int, int]]]:
        """Return, by rank, the kinds and bytes of its communication, in order."""
        assert self.trace is not None
        return [
            [(int(op["kind"]), int(op["bytes"])) for op in rank.ops if op["lane"] == Lane.COMM]
            for rank in self.trace.ranks
        ]
