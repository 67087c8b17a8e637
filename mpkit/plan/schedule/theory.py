"""What the papers say about the schedules' bubbles."""

from __future__ import annotations

from fractions import Fraction

from mpkit.plan.schedule.catalogue import SCHEDULES

__all__ = ["bubble_in_theory"]


def bubble_in_theory(name: str, p: int, m: int, v: int = 1, *, recompute: bool = False) -> Fraction | None:
    """Return the idle fraction of a step's span, averaged over ranks, in theory.

    Stages are equal, F = I = W, and messages take no time.

    The span is from the first action of any rank to the last action of any rank (GPipe's bubble; Megatron divides by
    the ideal time instead). So a rank that begins later in ZB-H2 counts as idle until then.

    Args:
        name: the name of a schedule in the catalogue.
        p, m, v: ranks, micro-batches, stages per rank.
        recompute: whether a backward recomputes its forward: then a micro-batch takes 4 instead of 3, and ranks are
            idle for as long as before, since they recompute while they wait for the gradient.

    Returns:
        the fraction; None where the papers give none, with too few micro-batches to fill the pipeline.

    >>> bubble_in_theory("gpipe", 4, 8), bubble_in_theory("interleaved_1f1b", 4, 8, 2)
    (Fraction(3, 11), Fraction(3, 19))
    >>> bubble_in_theory("zbv", 4, 8, 2)
    Fraction(1, 17)
    """
    entry = SCHEDULES[name]
    if entry.idle is None or not (entry.filled(p, m) or p == 1):
        return None
    idle = entry.idle(p, m)
    # A rank's work, in forwards of a stage.
    busy = (4 if recompute else 3) * m * v
    return Fraction(idle, idle + busy)
