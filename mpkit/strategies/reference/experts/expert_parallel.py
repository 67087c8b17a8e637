"""Expert parallelism: each of n ranks has T tokens and E / n experts; all-to-alls bring
tokens there and back.

    route        as on one rank, this rank's tokens
    permute      rows sorted by expert, so that those for one rank are side by side
    count        an all-to-all of E numbers: how many rows each rank sends
                 to each expert
    dispatch     an all-to-all with uneven parts: rows go to the ranks of their experts
    experts      rows arrive sorted by the rank that sent them; sort by expert, compute,
                 and undo the sorting
    return       the same all-to-all the other way
    combine      as on one rank

In the backward the gradients take both the other way. Under uniform routing each of the
four sends T k h (n-1)/n elements per rank. Gradients of experts are over all ranks'
tokens already; those of other layers are to be summed.

Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation",
ICLR 2021, section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mpkit as mk
from mpkit.strategies.reference.experts.exchange import exchange
from mpkit.strategies.reference.experts.mixture_of_experts import (
    combine,
    experts,
    permute,
    route,
)


def expert_parallel(
    ctx: mk.Context, x: Tensor, W: Tensor, A: Tensor, B: Tensor, k: int
) -> Tensor:
    """Return the layer's output (T, h) of this rank's tokens.
    A: (E/n, h, f), B: (E/n, f, h), this rank's experts.
    """
    # ---- route
    chosen, weights = route(x, W, k)
    return visit_experts(ctx, x, chosen, weights, A, B)


def visit_experts(
    ctx: mk.Context, x: Tensor, chosen: Tensor, weights: Tensor, A: Tensor, B: Tensor
) -> Tensor:
    """Return the layer's output (T, h) of tokens that are routed already.
    chosen, weights: (T, k).
    """
    # ---- permute
    rows, order, counts = permute(x, chosen, ctx.world_size * len(A))
    # ---- count
    # from each rank, for each expert here
    theirs = ctx.comm.all_to_all(counts).view(ctx.world_size, len(A))
    sends, receives = (
        c.view(ctx.world_size, -1).sum(1).tolist() for c in (counts, theirs)
    )
    # ---- dispatch
    rows = exchange(ctx, rows, sends, receives)
    # ---- experts
    by_sender = torch.arange(len(A)).repeat(ctx.world_size)
    by_expert = by_sender.repeat_interleave(theirs.flatten()).argsort(stable=True)
    rows = experts(rows[by_expert], theirs.sum(0), A, B)[by_expert.argsort()]
    # ---- return
    rows = exchange(ctx, rows, receives, sends)
    # ---- combine
    return combine(rows, order, weights)
