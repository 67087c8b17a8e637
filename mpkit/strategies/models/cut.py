"""Cutting a chain of layers into stages."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from math import inf

__all__ = ["balance", "cut"]


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


def cut(
    names: Sequence[str], costs: Sequence[float], stages: int, at: Sequence[int | str] | None
) -> list[range]:
    """Divide the layers among the stages: where the user said, or balanced by cost.

    Args:
        names: the names of the layers.
        costs: the costs of the layers.
        stages: the number of stages.
        at: the first layer of each stage but stage 0, by number or name; None: balanced by cost.

    >>> cut(["embedding", "0", "1", "head"], [0, 3, 3, 1], 2, at=["head"])
    [range(0, 3), range(3, 4)]

    Raises:
        ValueError: there are more stages than layers, or a cut is at a layer that does not exist.
    """
    layers = len(names)
    if not layers:
        raise ValueError(
            f"{stages} stages, but the model is one block, with nothing to cut between. Plan.serial() or "
            f"Plan.ddp({stages}) takes it as it is; Plan.gpipe({stages}, 8) takes a deeper model."
        )
    if stages > layers:
        raise ValueError(
            f"{stages} stages, but the model has {layers} layer{'s' * (layers != 1)} "
            f"({', '.join(names)}): each stage needs at least one. At most pp={layers} works, or a deeper model."
        )
    if at is None:
        return balance(costs, stages)
    points = [_point(point, names) for point in at]
    bounds = [0, *points, layers]
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"cut={list(at)} leaves a stage empty or goes back: the first layers of the stages have to rise from 1 to "
            f"{layers - 1}. The model's layers are {', '.join(f'{i}: {n}' for i, n in enumerate(names))}; "
            f"balanced it would be cut={[part.start for part in balance(costs, stages)[1:]]}."
        )
    return [range(a, b) for a, b in pairwise(bounds)]


def _point(point: int | str, names: Sequence[str]) -> int:
    if not isinstance(point, str):
        return int(point)
    if point in names:
        return list(names).index(point)
    near = get_close_matches(point, names, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"cut at {point!r}: the model has no layer of that name. {hint}It has {', '.join(names)}."
    )
