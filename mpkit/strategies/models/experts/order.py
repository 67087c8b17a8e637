"""Which experts share a rank: by default neighbours; in another order, those that together are as busy as others.

The order says nothing about what a model computes, only about where. So it may differ from one step to the next, and
training stays equal to serial training: weights and optimizer states travel with their expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from mpkit.common.tracebacks import public

__all__ = ["order_of_experts", "place_experts", "placed_experts"]


@public
def place_experts(model: nn.Module, orders: Mapping[str, Sequence[int]]) -> nn.Module:
    """Say in which order ranks divide the experts of a model's layers, and return the model.

    `Plan(ep=n)` gives the first 1/n of an order to the first rank of a group, and so on. To move experts between two
    steps, save a checkpoint after the first, and resume from it after this call. Without expert parallelism the order
    changes nothing.

    >>> from mpkit.models import GPT
    >>> model = place_experts(GPT(layers=1, width=8, heads=2, experts=4), {"block0.mlp.experts": [0, 2, 1, 3]})
    >>> order_of_experts(model.block0.mlp.experts, 4)
    (0, 2, 1, 3)

    Args:
        model: the whole model, as it is given to `Cluster.train`.
        orders: by the name of a layer's experts, their numbers in the order of the ranks; `ExpertBalance.orders` has
            them, if it has as many slots as experts.

    Raises:
        ValueError: the model has no such layer, or an order leaves out one of its experts, or names others.
    """
    layers = dict(model.named_modules())
    found = [name for name in layers if name.endswith("experts")]
    if not isinstance(orders, Mapping):
        raise ValueError(
            f"place_experts(model, {orders!r:.60}): orders have the names of layers, such as "
            f"place_experts(model, {{{(found or ['block0.mlp.experts'])[0]!r}: [0, 2, 1, 3]}})"
        )
    for name, order in orders.items():
        experts = len(next(layers[name].parameters(), ())) if name in layers else 0
        if not experts:
            raise ValueError(
                f"place_experts: no experts are called {name!r}; there are {', '.join(found) or 'none'}"
            )
        if sorted(order) != list(range(experts)):
            raise ValueError(
                f"place_experts: {list(order)} is not an order of the {experts} experts of {name}, each of which it "
                f"has once: {list(range(experts))} is one"
            )
    for name, order in orders.items():
        layers[name].__dict__["expert_order"] = tuple(map(int, order))
    return model


def order_of_experts(module: nn.Module, experts: int) -> tuple[int, ...]:
    """Return the experts in the order of their ranks.

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
