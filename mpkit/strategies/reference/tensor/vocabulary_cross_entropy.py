"""Cross-entropy of logits that are divided by vocabulary, without gathering them: three
numbers per token are summed.

    max       m = max over ranks of max_j z_j, so that no exponential overflows
    sum       S = sum over ranks of sum_j exp(z_j - m)
    target    z_y, which the rank with token y in its part of the vocabulary has
    loss      log S - (z_y - m), the mean over tokens
    backward  (softmax_j - 1[j = y]) / tokens, for this rank's j: nothing is
              communicated

Three all-reduces of b s elements, where gathering the logits would take b s V.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3: "we fuse the output of the
parallel GEMM with the cross entropy loss".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mpkit as mk


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, z_i: Tensor, y: Tensor, ctx: mk.Context) -> Tensor:
        # ---- max
        m = ctx.comm.all_reduce(z_i.max(dim=-1).values, op="max")
        # ---- sum
        exponentials = (z_i - m[:, None]).exp()
        S = ctx.comm.all_reduce(exponentials.sum(dim=-1))
        # ---- target
        local = y - ctx.rank * z_i.shape[1]
        is_here = (local >= 0) & (local < z_i.shape[1])
        one_hot = torch.zeros_like(z_i).scatter_(
            1, local.clamp(0, z_i.shape[1] - 1)[:, None], is_here[:, None].to(z_i)
        )
        z_y = ctx.comm.all_reduce(((z_i - m[:, None]) * one_hot).sum(dim=-1))
        # ---- loss
        saved.save_for_backward((exponentials / S[:, None] - one_hot) / len(y))
        return (S.log() - z_y).mean()

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * saved.saved_tensors[0], None, None


def vocabulary_cross_entropy(ctx: mk.Context, z_i: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss, the same on every rank.
    z_i: (b s, V / t), this rank's logits; y: (b s), tokens.
    """
    return _CrossEntropy.apply(z_i, y, ctx)
