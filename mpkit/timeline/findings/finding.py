"""Finding: one reason why a step takes as long as it does."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One reason why a step takes as long as it does.

    Attributes:
        kind: what it is, such as "straggler" or "late bucket"; `mpkit.timeline.diagnosis.rules.RULES` has all kinds.
        words: the finding, a sentence with its numbers.
        reason: why that costs time.
        remedy: what to try.
        gain: seconds by which the step would be shorter without it.
        by: how that is known: "replay" of the step's own operations, or "simulation" of another schedule; "" where no
            time is at stake.
        step: the number of the step; -1 if the timeline has no steps.
        ranks: the ranks where it is seen, counted from 0; `words` has the numbers that an imported program gives them.
        ops: the rows of its spans in `timeline.step(step).spans`.
        check: a call on `timeline` that returns the numbers of the sentence.
        urgent: whether it is about to end the run; then it goes before all that only cost time.
        idle: the cause of idle time that it adds to (`mpkit.timeline.idleness.CAUSES`); "" where ranks work too long.
    """

    kind: str
    words: str
    reason: str
    remedy: str
    gain: float
    by: str
    step: int
    ranks: tuple[int, ...]
    ops: tuple[int, ...] = field(default=(), repr=False)
    check: str = ""
    urgent: bool = False
    idle: str = ""
