"""All forwards first, then all backwards: GPipe, its special case of one micro-batch at a time, and looped GPipe.

In the drawings time runs to the right, each row is a rank, `F2` is the forward of micro-batch 2, and a backward `B2`
takes twice as long as a forward, as the dashes show. Dots are the bubble. Where a rank holds several stages, the
stage is named too: `3F2`.
"""

from __future__ import annotations

from mpkit.plan.schedule.action import Action
from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.stage_to_rank import loops

__all__ = ["gpipe", "looped_bfs", "naive"]


def naive(p: int, m: int = 1) -> Schedule:
    """Build naive model parallelism: the model is cut over p ranks, and one works while the others wait for it.

    With m > 1 each micro-batch runs forward and backward before the next one starts (gradient accumulation), which
    saves memory but no time: the bubble stays (p-1)/p.

    >>> print(naive(3))
    rank 0 | F0  .  .  .  .  .  . B0 --
    rank 1 |  . F0  .  .  . B0 --  .  .
    rank 2 |  .  . F0 B0 --  .  .  .  .
    """
    row = [(kind, microbatch) for microbatch in range(m) for kind in "FB"]
    return Schedule([[Action(k, stage, i) for k, i in row] for stage in range(p)], name="naive")


def gpipe(p: int, m: int) -> Schedule:
    """Build GPipe: the batch is split into m micro-batches; all forwards run in order, then all backwards in reverse.

    >>> print(gpipe(3, 4))
    rank 0 | F0 F1 F2 F3  .  .  .  .  .  . B3 -- B2 -- B1 -- B0 --
    rank 1 |  . F0 F1 F2 F3  .  .  . B3 -- B2 -- B1 -- B0 --  .  .
    rank 2 |  .  . F0 F1 F2 F3 B3 -- B2 -- B1 -- B0 --  .  .  .  .

    The bubble is (p-1)/(m+p-1) of the step, which is small once m >= 4p. Each rank holds the activations of all m
    micro-batches or, with recomputation, only their inputs and the activations of one.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019, section 2.3 and figure 2c.
    """
    forwards = [("F", microbatch) for microbatch in range(m)]
    backwards = [("B", microbatch) for microbatch in reversed(range(m))]
    return Schedule(
        [[Action(k, stage, i) for k, i in forwards + backwards] for stage in range(p)], name="gpipe"
    )


def looped_bfs(p: int, m: int, v: int = 2) -> Schedule:
    """Build looped BFS: GPipe with v stages per rank; all micro-batches run through a stage before the next.

    >>> print(looped_bfs(2, 3))
    rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2   .   .   . 2B2 --- 2B1 --- 2B0 --- 0B2 --- 0B1 --- 0B0 ---
    rank 1 |   . 1F0 1F1 1F2 3F0 3F1 3F2 3B2 --- 3B1 --- 3B0 --- 1B2 --- 1B1 --- 1B0 ---   .   .

    A stage takes 1/v of the time, so a loop comes round sooner and the bubble is (p-1)/(vm+p-1); all v m activations
    are held. A stage's work is done in one piece, so sharded replicas can gather its weights once per step.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023.
    """
    rows = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        forwards = [Action("F", s, i) for s in stages for i in range(m)]
        backwards = [Action("B", s, i) for s in reversed(stages) for i in reversed(range(m))]
        rows.append(forwards + backwards)
    return Schedule(rows, "looped_bfs", loops(p, v))
