"""Balance: a chain of layers in contiguous stages, none of which costs more than it must."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import inf

from mpkit.common.tracebacks import public

__all__ = ["balance"]


@public
def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Cut a chain into contiguous stages so that the most expensive stage costs as little as possible.

    The slowest stage sets a pipeline's pace. Among the best cuts by that measure, choose the one with the smallest sum
    of squares, so that the other stages are balanced too, and among those the one whose earliest stages are longest.

    Args:
        costs: the cost of each layer, such as its FLOPs.
        stages: the number of stages, at most the number of layers.

    Returns:
        The layers of each stage.

    >>> balance([1, 1, 1, 1, 4], 3)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    layers = len(costs)
    assert 1 <= stages <= layers
    upto = [0.0]  # upto[i]: cost of the layers before i
    for cost in costs:
        upto.append(upto[-1] + cost)

    @cache
    def dearest(first: int, parts: int) -> float:
        """Return the least possible cost of the most expensive of `parts` stages, for the layers from `first` on."""
        if parts == 1:
            return upto[layers] - upto[first]
        least = inf
        for end in range(first + 1, layers - parts + 2):
            cost = upto[end] - upto[first]
            if cost >= least:
                break  # a longer first stage would cost even more
            least = min(least, max(cost, dearest(end, parts - 1)))
        return least

    limit = dearest(0, stages) * (1 + 1e-12)

    @cache
    def evenest(first: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """Return the least sum of squared costs within `limit`, and the stages' ends.

        The ends are negated, so that a later end is less.
        """
        best: tuple[float, tuple[int, ...]] = (inf, ())
        for end in range(first + 1, layers - parts + 2) if parts > 1 else [layers]:
            cost = upto[end] - upto[first]
            if cost > limit:
                break
            rest, later = evenest(end, parts - 1) if parts > 1 else (0.0, ())
            best = min(best, (cost**2 + rest, (-end, *later)))
        return best

    bounds = [0, *(-end for end in evenest(0, stages)[1])]
    return [range(a, b) for a, b in pairwise(bounds)]
