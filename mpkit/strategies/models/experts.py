"""A mixture of experts as a layer: a router, and experts whose weights lie side by side in one tensor.

    route       a token's experts are those of its k largest probabilities, which are their weights
    experts     each computes the tokens that chose it; no token is dropped
    combine     the weighted sum over each token's experts

`Experts` has the interface that transformers' models have: `experts(x, chosen, weights)`, all parameters [E, ...]. So
one description holds for both, and `Plan(ep=n)` divides the first dimension (`mpkit.strategies.experts`).

Source: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", ICLR 2017.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.common.torch_private import FakeTensor

__all__ = ["Experts", "MixtureOfExperts", "count_rows"]


class MixtureOfExperts(nn.Module):
    """In place of a transformer's MLP: each token visits `top_k` of `experts` MLPs, [..., width] -> the same.

    >>> layer = MixtureOfExperts(width=8, experts=4, top_k=2)
    >>> layer(torch.zeros(2, 3, 8)).shape, layer.experts.up.shape
    (torch.Size([2, 3, 8]), torch.Size([4, 32, 8]))

    Args:
        width: h, of the tokens.
        experts: E, the number of experts.
        top_k: k, how many of them each token visits.
        hidden: the width inside of an expert; None: 4 h.
        dropout: the dropout rate of what is added to the residual stream.

    Raises:
        ValueError: there are fewer experts than a token visits.
    """

    def __init__(
        self, width: int, experts: int, top_k: int = 2, hidden: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(
                f"MixtureOfExperts(experts={experts}, top_k={top_k}): a token visits top_k different experts, 1 to "
                f"{experts} of them: top_k={min(max(top_k, 1), experts)}"
            )
        self.top_k = top_k
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden or 4 * width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        tokens = x.reshape(-1, x.shape[-1])
        # ---- route
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        # ---- experts, combine
        mixed: Tensor = self.dropout(self.experts(tokens, chosen, weights).view_as(x))
        return mixed


class Experts(nn.Module):
    """E MLPs: a linear map, a GELU, and a linear map back, without biases.

    Attributes:
        up: their first weights, [E, hidden, width].
        down: their second weights, [E, width, hidden].
    """

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            x: tokens, [T, width].
            chosen: each token's experts, [T, k], integers from 0 to E - 1.
            weights: their weights, [T, k].
        """
        order = chosen.flatten().argsort(stable=True)
        token = order // chosen.shape[1]
        parts = x.index_select(0, token).split(count_rows(chosen, len(self.up)))
        made = [
            F.linear(F.gelu(F.linear(part, up)), down)
            for part, up, down in zip(parts, self.up.unbind(), self.down.unbind(), strict=True)
        ]
        weighted = torch.cat(made) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, weighted.to(x.dtype))


def count_rows(chosen: Tensor, experts: int) -> list[int]:
    """Return how many rows each expert gets; of fake tensors, which have no values, all get equally many.

    >>> count_rows(torch.tensor([[0, 2], [2, 3]]), 4)
    [1, 0, 2, 1]
    """
    if isinstance(chosen, FakeTensor) or chosen.is_meta:
        rows = chosen.numel()
        return [rows // experts + (i < rows % experts) for i in range(experts)]
    counts: list[int] = chosen.flatten().bincount(minlength=experts).tolist()
    return counts
