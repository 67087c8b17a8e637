"""f and g, the conjugate operators of tensor parallelism: each is the other's backward.

          forward       backward
    f     identity      all-reduce
    g     all-reduce    identity

f stands where every rank begins to compute its part of the same X, so that the gradient of X is a sum over ranks. g
stands where the parts Y_i are summed.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019,
section 3, figure 3 and code 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mpkit as mk

__all__ = ["f", "g"]


class _F(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, x: Tensor, ctx: mk.Context, group: Any) -> Tensor:
        saved.of = ctx, group
        return x.view_as(x)

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx, group = saved.of
        return ctx.comm.all_reduce(gradient.clone(), group), None, None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, y: Tensor, ctx: mk.Context, group: Any) -> Tensor:
        return ctx.comm.all_reduce(y.clone(), group)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def f(ctx: mk.Context, x: Tensor, group: Any = None) -> Tensor:
    """Return x; all-reduce its gradient over the ranks of the group (None: all)."""
    return _F.apply(x, ctx, group)


def g(ctx: mk.Context, y: Tensor, group: Any = None) -> Tensor:
    """Return the sum of y over the ranks of the group (None: all); its gradient passes as it is."""
    return _G.apply(y, ctx, group)
