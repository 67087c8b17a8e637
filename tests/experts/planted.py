"""Faults of expert parallelism, planted on the ranks: the run's own proof has to find each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mpkit.strategies.data_parallel.replicated_part import ReplicatedPart
from mpkit.strategies.experts import divided_experts
from mpkit.strategies.update.update import Update
from tests.proof.planted import Planted

__all__ = ["EXPERT_FAULTS", "PlantedInExperts"]


def of_all_replicas(rank: int) -> None:
    """Gradients of different experts are summed, as if all replicas held the same ones."""
    ReplicatedPart.replicas_of = lambda self, parameter: self.replicas  # type: ignore[method-assign]


def by_other_experts(rank: int) -> None:
    """A rank's experts compute each other's rows."""
    original = divided_experts._forward

    def forward(compute: Callable[..., Tensor], names: Any, here: int, *rest: Any, **kwargs: Any) -> Tensor:
        def computed(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return compute(x, (chosen + 1) % here, weights)

        return original(computed, names, here, *rest, **kwargs)

    divided_experts._forward = forward


def without_gradient(rank: int) -> None:
    """Rows that come back from other ranks bring no gradient."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.new_zeros(sum(ctx.sends), *gradient.shape[1:]), None, None, None

    divided_experts._Exchange.backward = staticmethod(backward)  # type: ignore[method-assign]


def counted_by_each(rank: int) -> None:
    """The norm to clip by counts what all ranks hold alike once on each of them."""
    original = Update.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._first_of_rest = True

    Update.__init__ = made  # type: ignore[method-assign]


EXPERT_FAULTS: dict[str, Callable[[int], None]] = {
    "experts of all replicas": of_all_replicas,
    "other experts": by_other_experts,
    "no gradient of rows": without_gradient,
    "norm by each": counted_by_each,
}


class PlantedInExperts(Planted):
    """A loss that plants one of these faults on each rank that unpickles it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if dist.is_initialized():
            EXPERT_FAULTS[self.fault](dist.get_rank())
