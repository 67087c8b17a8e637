"""Ring attention: each of c ranks has s / c tokens; keys and values go round, and
softmax is put together on the way.

    begin      nothing seen yet: maximum m = -inf, normalizer l = 0, output o = 0
    attend     c times, to the block of keys and values that is here; then pass it on to
               the next rank:
                   m' = max(m, max_j q k_j)
                   l' = e^(m - m') l + sum_j e^(q k_j - m')
                   o' = e^(m - m') o + sum_j e^(q k_j - m') v_j
    end        o / l

In the backward the gradients of the blocks go round the other way.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite
Context", ICLR 2024, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mpkit as mk


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, block: Tensor, ctx: mk.Context) -> Tensor:
        saved.ctx = ctx
        return _shift(ctx, block, 1)

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _shift(saved.ctx, gradient, -1), None


def _shift(ctx: mk.Context, block: Tensor, by: int) -> Tensor:
    sent = ctx.comm.isend(block.contiguous(), (ctx.rank + by) % ctx.world_size)
    came = ctx.comm.recv(torch.empty_like(block), (ctx.rank - by) % ctx.world_size)
    sent.wait()
    return came


def ring_attention(ctx: mk.Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return this rank's rows of causal softmax(q k^T / sqrt(d)) v.
    q, k, v: (b, a, s / c, d), its tokens' own.
    """
    n, c = q.shape[-2], ctx.world_size
    rows, block = ctx.rank * n + torch.arange(n), torch.stack([k, v])
    # ---- begin
    m = q.new_full((*q.shape[:-1], 1), -torch.inf)
    l, o = q.new_zeros(*q.shape[:-1], 1), torch.zeros_like(q)
    for hop in range(c):
        # ---- attend
        columns = (ctx.rank - hop) % c * n + torch.arange(n)
        scores = q @ block[0].mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(columns > rows[:, None], -torch.inf)
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True)).detach()
        p, kept = (scores - m_new).exp(), (m - m_new).exp()
        m, l, o = m_new, kept * l + p.sum(-1, keepdim=True), kept * o + p @ block[1]
        if hop < c - 1:
            block = _Pass.apply(block, ctx)
    # ---- end
    return o / l
