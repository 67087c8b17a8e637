"""Sequence parallelism: LayerNorm, which tensor parallelism computes t times over, divided by tokens: s / t per rank.

               forward           backward
    gather     all-gather        reduce-scatter    tokens come together before a column-parallel layer (g in the paper)
    scatter    reduce-scatter    all-gather        sums go to who has the tokens, after a row-parallel one (g bar)

A reduce-scatter and an all-gather are what an all-reduce consists of: the volume stays, and a rank keeps 1 / t of the
activations between the layers.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import mpkit as mk

__all__ = ["sequence_parallel_mlp"]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, ctx: mk.Context) -> Tensor:
        saved.ctx = ctx
        return ctx.comm.all_gather(x.contiguous())

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return saved.ctx.comm.reduce_scatter(gradient.contiguous()), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, y: Tensor, ctx: mk.Context) -> Tensor:
        saved.ctx = ctx
        return ctx.comm.reduce_scatter(y.contiguous())

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return saved.ctx.comm.all_gather(gradient.contiguous()), None


def sequence_parallel_mlp(ctx: mk.Context, X_i: Tensor, A_i: Tensor, B_i: Tensor) -> Tensor:
    """Return this rank's tokens of X + MLP(LayerNorm(X)). X_i: (s / t, b, h), A_i: (h, 4 h / t), B_i: (4 h / t, h)."""
    Y = _Gather.apply(F.layer_norm(X_i, X_i.shape[-1:]), ctx)
    return X_i + _Scatter.apply(F.gelu(Y @ A_i) @ B_i, ctx)
