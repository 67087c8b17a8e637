"""Ulysses: each of c ranks has s / c tokens; for attention an all-to-all gives it a / c
heads of all tokens instead.

    divide heads     of q, k and v: (b, a, s / c, d) becomes (b, a / c, s, d)
    attend           as on one rank
    divide tokens    of the output: (b, a / c, s, d) becomes (b, a, s / c, d)

In the backward the gradients take the same exchanges the other way. A rank sends
4 b s h / c (c-1)/c elements forward.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of
Extreme Long Sequence Transformer Models", 2023, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mpkit as mk


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, parts: Tensor, ctx: mk.Context) -> Tensor:
        saved.ctx = ctx
        return ctx.comm.all_to_all(parts.contiguous())

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return saved.ctx.comm.all_to_all(gradient.contiguous()), None


def ulysses(ctx: mk.Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return this rank's rows of causal softmax(q k^T / sqrt(d)) v.
    q, k, v: (b, a, s / c, d), its tokens' own.
    """
    c = ctx.world_size

    def divide_heads(x: Tensor) -> Tensor:
        # (c, b, a / c, s / c, d): the heads of each rank
        parts = x.unflatten(1, (c, -1)).movedim(1, 0)
        return _Exchange.apply(parts, ctx).movedim(0, 2).flatten(2, 3)

    def divide_tokens(x: Tensor) -> Tensor:
        # (c, b, a / c, s / c, d): the tokens of each rank
        parts = x.unflatten(2, (c, -1)).movedim(2, 0)
        return _Exchange.apply(parts, ctx).movedim(0, 1).flatten(1, 2)

    # ---- divide heads
    q, k, v = divide_heads(q), divide_heads(k), divide_heads(v)
    # ---- attend
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    o = scores.softmax(-1) @ v
    # ---- divide tokens
    return divide_tokens(o)
