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
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from mpkit.strategies.models.experts.mixture import MixtureOfExperts

__all__ = ["BatchShare", "RouterLosses", "WholeBatch", "count_choices", "number_rows"]


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
