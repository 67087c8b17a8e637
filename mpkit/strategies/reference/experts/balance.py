"""What keeps experts equally busy, and how much an overloaded one computes.

    auxiliary loss     E sum_e f_e P_e, with f_e the share of the choices that went to
                       expert e, and P_e its mean p: it is 1 for uniform routing, and
                       grows as a few experts get more of both
    bias               a number per expert, which is added to p for the choice, and not
                       for the weight; after each step it moves up for experts with
                       fewer rows than the mean, and down for the others
    capacity           an expert takes C = ceil(c T k / E) rows at most; the choices
                       beyond that are dropped, and count with a weight of 0 (the
                       residual stream still has the token)

f and P of the auxiliary loss, and the capacity, depend on all tokens of the batch:
micro-batches and ranks that compute them of their own tokens compute something else
than serial training.

Sources: Fedus et al., "Switch Transformers", JMLR 2022, section 2.2; Wang et al.,
"Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor
from torch.nn import functional as F


def auxiliary_loss(p: Tensor, chosen: Tensor) -> Tensor:
    """Return the loss to add, times a small factor.
    p: (T, E), of the router; chosen: (T, k).
    """
    # ---- auxiliary loss
    f = chosen.flatten().bincount(minlength=p.shape[1]) / chosen.numel()
    return p.shape[1] * (f * p.mean(0)).sum()


def route_with_bias(p: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each token's experts and their weights, (T, k) each.
    p: (T, E), bias: (E,).
    """
    # ---- bias
    chosen = (p + bias).topk(k).indices
    weights = p.gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) if k > 1 else weights


def move_bias(bias: Tensor, counts: Tensor, rate: float = 0.001) -> Tensor:
    """Return the bias for the next step.
    counts: (E,), the rows of each expert in the whole batch.
    """
    return bias + rate * torch.sign(counts.double().mean() - counts).to(bias)


def drop_beyond_capacity(
    chosen: Tensor, weights: Tensor, E: int, c: float
) -> tuple[Tensor, int]:
    """Return the weights with 0 for choices that are dropped, and the number of
    these; the first tokens come first.
    """
    # ---- capacity
    C = ceil(c * chosen.numel() / E)
    one_hot = F.one_hot(chosen.flatten(), E)
    # 1 for an expert's first row
    place = (one_hot.cumsum(0) * one_hot).sum(1).view_as(chosen)
    return weights * (place <= C), int((place > C).sum())
