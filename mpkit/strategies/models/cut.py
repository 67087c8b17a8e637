"""Cutting a chain of layers into stages."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise

from mpkit.plan.balance import balance

__all__ = ["cut"]


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
