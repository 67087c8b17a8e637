"""A mixture of experts: a router sends each token to k of E small MLPs, and sums what
they make of it, weighted.

    route       p = softmax(x W); a token's experts are those of its k largest p, which
                are their weights
    permute     a row per token and choice, sorted by expert
    experts     each expert computes its rows
    combine     rows in the order of the tokens again, weighted, and summed over
                each token's choices

No token is dropped ("dropless"), however many an expert gets. A shared expert, which
all tokens visit, is one more MLP whose output is added. `balance` keeps the experts
equally busy; `expert_parallel` divides them among ranks.

Sources: Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
Mixture-of-Experts Layer", ICLR 2017, section 2; Gale et al., "MegaBlocks", MLSys 2023,
for the dropless permutation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def route(x: Tensor, W: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each token's experts and their weights, (T, k) each.
    x: (T, h), W: (h, E).
    """
    weights, chosen = (x @ W).softmax(-1).topk(k)
    return chosen, weights / weights.sum(-1, keepdim=True) if k > 1 else weights


def permute(x: Tensor, chosen: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows (T k, h) sorted by expert, their order, and the number of rows
    of each expert, (E,).
    """
    order = chosen.flatten().argsort(stable=True)
    return x[order // chosen.shape[1]], order, chosen.flatten().bincount(minlength=E)


def experts(rows: Tensor, counts: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Return gelu(rows A_e) B_e, where the first counts[0] rows are expert 0's.
    A: (E, h, f), B: (E, f, h).
    """
    parts = zip(rows.split(counts.tolist()), A, B, strict=True)
    return torch.cat([F.gelu(part @ a) @ b for part, a, b in parts])


def combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum over each token's choices, (T, h).
    rows: (T k, h) in this order.
    """
    rows = rows[order.argsort()].unflatten(0, weights.shape)
    return (rows * weights[..., None]).sum(1)


def mixture_of_experts(x: Tensor, W: Tensor, A: Tensor, B: Tensor, k: int) -> Tensor:
    """Return the layer's output (T, h) of x (T, h)."""
    # ---- route
    chosen, weights = route(x, W, k)
    # ---- permute
    rows, order, counts = permute(x, chosen, len(A))
    # ---- experts
    rows = experts(rows, counts, A, B)
    # ---- combine
    return combine(rows, order, weights)
