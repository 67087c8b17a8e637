"""A mixture of experts: the layer (`mixture`), what keeps experts busy (`routing`), and where they are (`order`)."""

from mpkit.strategies.models.experts.mixture import Experts, MixtureOfExperts, SharedExperts, count_rows
from mpkit.strategies.models.experts.routing import (
    order_of_experts,
    place_experts,
    placed_experts,
)

__all__ = [
    "Experts",
    "MixtureOfExperts",
    "SharedExperts",
    "count_rows",
    "order_of_experts",
    "place_experts",
    "placed_experts",
]
