"""Live: the activations that a rank holds, computed from the order of its actions alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpkit.plan.schedule.action import Action

__all__ = ["live"]


def live(row: Iterable[Action], activation: Sequence[float] = ()) -> list[float]:
    """Return what a rank holds while each action of its row runs.

    A stage holds a micro-batch's activations from its F to its B, inclusive, or to its W if the backward is split: I
    frees nothing, since W needs what the forward kept.

    Args:
        row: a rank's actions, in order.
        activation: by stage, how much it holds per micro-batch; left out, 1 each.

    >>> live(map(Action.parse, "0F0 0F1 0I0 0F2 0W0 0B1 0B2".split()))
    [1, 2, 2, 3, 3, 2, 1]
    """
    held: list[float] = []
    now = 0.0 if activation else 0
    for kind, stage, _ in row:
        size = activation[stage] if activation else 1
        if kind == "F":
            now += size
        held.append(now)
        if kind in ("B", "W"):
            now -= size
    return held
