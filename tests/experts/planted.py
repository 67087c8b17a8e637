"""Faults of expert parallelism, planted on the ranks: the run's own proof has to find each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mpkit.strategies.experts import divided_experts
from mpkit.strategies.replicas.part import ReplicatedPart
from mpkit.strategies.runtime.batch_routing import BatchRouting
from mpkit.strategies.update.update import Update
from tests.proof.planted import Planted

__all__ = ["BALANCE_FAULTS", "EXPERT_FAULTS", "PlantedInExperts"]


def of_all_replicas(rank: int) -> None:
    """Gradients of different experts are summed, as if all replicas held the same ones."""
    ReplicatedPart.replicas_of = lambda self, parameter: self.replicas  # type: ignore[method-assign]


def by_other_experts(rank: int) -> None:
    """A rank's experts compute each other's rows."""
    original = divided_experts._forward

    def forward(
        compute: Callable[..., Tensor], names: Any, order: tuple[int, ...], group: Any, *rest: Any, **kwargs: Any
    ) -> Tensor:  # fmt: skip
        here = len(order) // group.size

        def computed(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return compute(x, (chosen + 1) % here, weights)

        return original(computed, names, order, group, *rest, **kwargs)

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


def rows_of_a_rank(rank: int) -> None:
    """The auxiliary loss takes the rows of a rank's own tokens for those of the batch."""
    BatchRouting.rows_of = lambda self, layer: self._sum_own(layer)  # type: ignore[method-assign]


def bias_of_a_rank(rank: int) -> None:
    """Biases move by the rows of a rank's own tokens."""

    def end_step(self: BatchRouting) -> None:
        for layer in self._moved:
            layer.keep_rows(self._sum_own(layer))

    BatchRouting.end_step = end_step  # type: ignore[method-assign]


BALANCE_FAULTS: dict[str, Callable[[int], None]] = {
    "rows of a rank": rows_of_a_rank,
    "bias of a rank": bias_of_a_rank,
}


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
            (EXPERT_FAULTS | BALANCE_FAULTS)[self.fault](dist.get_rank())
