"""What ZeRO leaves on each replica: which model states it shards, and which elements of each parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from mpkit.plan.plan import Plan

__all__ = ["STATES", "Share", "sharded_states", "shares_of"]

STATES = ("parameters", "gradients", "optimizer states")
"""The model states, in the order of the ZeRO paper's figure 1."""


@dataclass(frozen=True)
class Share:
    """A parameter, and which replica holds which part of it.

    Attributes:
        name: its name in the model.
        shape: the shape of the whole parameter.
        parts: by replica, the first element of its part and the one after its last, in the flattened parameter.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]


def sharded_states(zero: int) -> dict[str, bool]:
    """Return which model states a ZeRO stage shards; the others are whole on every replica.

    >>> sharded_states(2)
    {'parameters': False, 'gradients': True, 'optimizer states': True}
    """
    return {state: zero >= least for state, least in zip(STATES, (3, 2, 1), strict=True)}


def shares_of(plan: Plan, model: nn.Module) -> tuple[Share, ...]:
    """Return which replica holds which elements of each parameter of a one-stage model, as `mpkit.strategies.replicas`
    does.

    >>> from torch import nn
    >>> from mpkit import Plan
    >>> for share in shares_of(Plan.zero(3, 2), nn.Linear(2, 3)):
    ...     print(share.name, share.parts)
    weight ((0, 5), (5, 6))
    bias ((0, 0), (0, 3))
    """
    import torch

    from mpkit.strategies.models.chain import layers_of
    from mpkit.strategies.replicas.flat import FlatLayout
    from mpkit.strategies.replicas.units import by_bucket, by_site, sites_of
    from mpkit.strategies.stage.stage import Stage

    n = plan.shards
    sites = sites_of({0: Stage(0, layers_of(model), torch.device("cpu"))})
    parts: dict[int, tuple[tuple[int, int], ...]] = {}
    units = by_site(sites) if plan.zero == 3 else by_bucket(sites, int(plan.bucket_mb * 2**20))
    for unit in units:
        layouts = [FlatLayout(unit.parameters, rank % n, n) for rank in range(plan.dp * plan.cp)]
        for i, parameter in enumerate(unit.parameters):
            parts[id(parameter)] = tuple(layout.own(i) for layout in layouts)
    return tuple(
        Share(name, tuple(parameter.shape), parts[id(parameter)])
        for name, parameter in model.named_parameters()
        if id(parameter) in parts
    )
