"""Which experts share a rank: by default neighbours; in another order, those that together are as busy as others.

The order says nothing about what a model computes, only about where. So it may differ from one step to the next, and
training stays equal to serial training: weights and optimizer states travel with their expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

__all__ = ["order_of_experts", "place_experts", "placed_experts"]


def place_experts(model: nn.Module, orders: Mapping[str, Sequence[int]]) -> nn.Module:
    """Say in which order ranks divide the experts of a model's layers, and return the model.

    `Plan(ep=n)` gives the first E/n of an order to the first rank of a group, and so on. To move experts between two
    steps, save a checkpoint after the first, and resume from it after this call.

    >>> from mpkit.models import GPT
    >>> model = place_experts(GPT(layers=1, width=8, heads=2, experts=4), {"block0.mlp.experts": [0, 2, 1, 3]})
    >>> order_of_experts(model.block0.mlp.experts, 4)
    (0, 2, 1, 3)

    Args:
        model: the whole model, as it is given to `Cluster.train`.
        orders: by the name of a layer's experts, each expert's number once; `ExpertBalance.orders` has them.

    Raises:
        ValueError: the model has no such layer, or an order is not one of all its experts.
    """
    layers = dict(model.named_modules())
    for name, order in orders.items():
        experts = len(next(layers[name].parameters(), ())) if name in layers else 0
        if not experts:
            known = ", ".join(layer for layer in layers if layer.endswith("experts"))
            raise ValueError(f"place_experts: no experts are called {name!r}; there are {known or 'none'}")
        if sorted(order) != list(range(experts)):
            raise ValueError(
                f"place_experts: {list(order)} is not an order of the {experts} experts of {name}: "
                f"{list(range(experts))} is one, in which each of them stands once"
            )
    for name, order in orders.items():
        layers[name].__dict__["expert_order"] = tuple(map(int, order))
    return model


def order_of_experts(module: nn.Module, experts: int) -> tuple[int, ...]:
    """Return the order in which ranks divide a layer's experts.

    Args:
        module: the layer's experts.
        experts: how many the whole layer has.
    """
    order: tuple[int, ...] = module.__dict__.get("expert_order", tuple(range(experts)))
    return order


def placed_experts(model: nn.Module) -> dict[str, list[int]]:
    """Return the orders that `place_experts` was given, by the name of a layer's experts."""
    placed = {name: each.__dict__.get("expert_order") for name, each in model.named_modules()}
    return {name: list(order) for name, order in placed.items() if order}
