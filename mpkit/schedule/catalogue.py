"""The schedules by name: pure functions of p stages and m micro-batches.

In the drawings time runs to the right, a row is a rank, `F2` is the forward of micro-batch 2, and a backward `B2`
takes twice as long as a forward, which the dashes show. Dots are the bubble.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpkit.schedule.action import Action
from mpkit.schedule.core import Schedule

if TYPE_CHECKING:
    from mpkit.plan import Plan

__all__ = ["NAMES", "build", "gpipe", "naive"]


def naive(p: int, m: int = 1) -> Schedule:
    """Naive model parallelism: the model is cut over p ranks, and one works while the others wait for it.

    With m > 1 each micro-batch goes forward and back before the next one starts (gradient accumulation), which
    saves memory and no time: the bubble stays (p-1)/p.

    >>> print(naive(3))
    rank 0 | F0  .  .  .  .  .  . B0 --
    rank 1 |  . F0  .  .  . B0 --  .  .
    rank 2 |  .  . F0 B0 --  .  .  .  .
    """
    row = [(kind, microbatch) for microbatch in range(m) for kind in "FB"]
    return Schedule([[Action(k, stage, i) for k, i in row] for stage in range(p)], name="naive")


def gpipe(p: int, m: int) -> Schedule:
    """GPipe: the batch in m micro-batches; all forwards in order, then all backwards in reverse.

    >>> print(gpipe(3, 4))
    rank 0 | F0 F1 F2 F3  .  .  .  .  .  . B3 -- B2 -- B1 -- B0 --
    rank 1 |  . F0 F1 F2 F3  .  .  . B3 -- B2 -- B1 -- B0 --  .  .
    rank 2 |  .  . F0 F1 F2 F3 B3 -- B2 -- B1 -- B0 --  .  .  .  .

    The bubble is (p-1)/(m+p-1) of the whole, small once m >= 4p; each rank holds the activations of all m
    micro-batches, or with recomputation their inputs only and the activations of one.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019, section 2.3 and figure 2c.
    """
    forwards = [("F", microbatch) for microbatch in range(m)]
    backwards = [("B", microbatch) for microbatch in reversed(range(m))]
    return Schedule(
        [[Action(k, stage, i) for k, i in forwards + backwards] for stage in range(p)], name="gpipe"
    )


NAMES: dict[str, Callable[[int, int], Schedule]] = {"naive": naive, "gpipe": gpipe}
"""What `Plan(schedule=...)` may name."""


def build(plan: Plan) -> Schedule:
    """The schedule of a plan: the named one for its stages and micro-batches, or the plan's own."""
    if isinstance(plan.schedule, Schedule):
        return plan.schedule
    return NAMES[plan.schedule](plan.stages, plan.microbatches)
