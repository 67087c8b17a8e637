"""Balanced routing: what keeps a layer's experts equally busy. All of it depends on all tokens of the batch.

    bias             b_e is added to p_te for the choice of experts, and not for the weight; before the next step it
                     moves by the rate, up for experts with fewer rows than the mean, and down for the others
    auxiliary loss   alpha E sum_e f_e P_e: f_e is expert e's share of the rows, P_e the mean of p_te over the tokens
    z-loss           beta mean_t (log sum_e exp x_te)^2 of the router's logits x, which keeps them small
    capacity         an expert takes C = ceil(c T k / E) rows, the first in the order of the batch; the rest is dropped
                     (of a batch that one forward computes; any other is rejected)

The two losses are added to the gradients only: the loss that a training reports stays the loss of its outputs. Their
gradients are p'_te = alpha E f_e / T and x'_te = 2 beta log(sum_e exp x_te) p_te / T. So of the whole batch a rank
needs f and T, and micro-batches and replicas can be summed.

Sources: Fedus et al., "Switch Transformers", JMLR 2022, section 2.2; Zoph et al., "ST-MoE", 2022, section 3.1 (z-loss);
Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024 (bias), as in DeepSeek-V3.
`mpkit.strategies.reference.experts.balance` has each in a few lines.

Which experts share a rank: by default neighbours; in another order, those that together are as busy as others.

The order says nothing about what a model computes, only about where. So it may differ from one step to the next, and
training stays equal to serial training: weights and optimizer states travel with their expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpkit.common.tracebacks import public

if TYPE_CHECKING:
    from mpkit.strategies.models.experts.mixture import MixtureOfExperts

__all__ = [
    "BatchShare",
    "RouterLosses",
    "WholeBatch",
    "count_choices",
    "number_rows",
    "order_of_experts",
    "place_experts",
    "placed_experts",
]


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


class WholeBatch:
    """What a layer asks about the batch of which it computes a part; here each forward is a batch of its own.

    `mpkit.strategies.runtime.batch_routing` answers for micro-batches and replicas.

    Attributes:
        loss_scale: the factor of the loss, and so of all gradients, with which 16 bits represent them.
    """

    loss_scale = 1.0

    def begin(self, layer: MixtureOfExperts) -> None:
        """Move the layer's bias, if this is the first forward of a step."""
        layer.move_bias()

    def share(self, layer: MixtureOfExperts, chosen: Tensor, samples: int) -> BatchShare:
        """Return the share of the batch that these tokens are.

        Args:
            layer: the layer, in training.
            chosen: each token's experts, [T, k], sample by sample.
            samples: the number of samples.
        """
        share = BatchShare(chosen, layer.experts_in_all, self.loss_scale)
        layer.keep_rows(share.rows())
        return share


class BatchShare:
    """The tokens of a forward as a share of their batch; here they are all of it.

    >>> share = BatchShare(torch.tensor([[0, 1], [0, 2], [0, 1]]), E=3)
    >>> share.rows().tolist(), share.places().tolist(), share.choices
    ([3, 2, 1], [[1, 1], [2, 1], [3, 2]], 6)

    Args:
        chosen: each token's experts, [T, k].
        E: the number of experts.
        loss_scale: the factor of all gradients.

    Attributes:
        chosen, E: as given.
        choices: T k, of the whole batch.
        scale: the gradient of a mean over the batch's tokens with respect to each of these: the loss scale / T.
    """

    def __init__(self, chosen: Tensor, E: int, loss_scale: float = 1.0) -> None:
        self.chosen, self.E = chosen, E
        self.choices = chosen.numel()
        self.scale = loss_scale / max(1, len(chosen))

    def rows(self) -> Tensor:
        """Return the rows of each expert in the whole batch, (E,)."""
        return count_choices(self.chosen, self.E)

    def places(self) -> Tensor:
        """Return each choice's number among those of its expert in the whole batch, [T, k]: 1 for the first."""
        return number_rows(self.chosen, self.E)


def count_choices(chosen: Tensor, E: int) -> Tensor:
    """Return how many choices fall on each expert, (E,)."""
    flat = chosen.flatten()
    return torch.zeros(E, dtype=torch.long, device=chosen.device).scatter_add(0, flat, torch.ones_like(flat))


def number_rows(chosen: Tensor, E: int) -> Tensor:
    """Return each choice's number among those of its expert, from 1 on, in the shape of `chosen`."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    rows = count_choices(chosen, E)
    first = (rows.cumsum(0) - rows).index_select(0, flat.index_select(0, order))
    numbers = torch.arange(1, flat.numel() + 1, device=chosen.device) - first
    return torch.zeros_like(flat).scatter(0, order, numbers).view_as(chosen)


class RouterLosses(torch.autograd.Function):
    """(p, logits) -> p, with the gradients of the auxiliary loss and of the z-loss added in the backward."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, logits: Tensor, share: BatchShare, alpha: float, beta: float) -> Tensor:
        """Return p."""
        ctx.share, ctx.alpha, ctx.beta = share, alpha, beta
        ctx.save_for_backward(p, logits)
        return p.view_as(p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dp: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of p and of the logits."""
        (p, logits), share = ctx.saved_tensors, ctx.share
        dlogits = None
        # ---- auxiliary loss
        if ctx.alpha:
            rows = share.rows()
            f = rows / rows.sum().clamp(min=1)
            dp = dp + (ctx.alpha * share.E * share.scale * f).to(dp.dtype)
        # ---- z-loss
        if ctx.beta:
            z = logits.logsumexp(-1, keepdim=True)
            dlogits = 2 * ctx.beta * share.scale * z * p
        return dp, dlogits, None, None, None
