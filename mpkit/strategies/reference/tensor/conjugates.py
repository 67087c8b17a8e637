"""The conjugate operators of tensor and sequence parallelism: of each pair, one is
the other's backward.

              forward           backward
    f         identity          all-reduce        X is the same on every rank, and each
                                                  computes a part from it
    g         all-reduce        identity          the parts Y_i are summed
    f_bar     all-gather        reduce-scatter    f, where each rank has the tokens X_i
    g_bar     reduce-scatter    all-gather        g, where each rank gets the sum
                                                  for its tokens

Sources: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models
Using Model Parallelism", 2019, section 3, figure 3; Korthikanti et al., "Reducing
Activation Recomputation", MLSys 2023, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mpkit as mk


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(
        saved: Any, x: Tensor, forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        saved.backward_of = backward
        return forward(x)

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return saved.backward_of(gradient.contiguous()), None, None


def f(ctx: mk.Context, X: Tensor, group: Any = None) -> Tensor:
    """Return X; all-reduce its gradient over the ranks of the group (None: all)."""
    return _Conjugate.apply(
        X, lambda X: X.view_as(X), lambda dX: (group or ctx.comm).all_reduce(dX.clone())
    )


def g(ctx: mk.Context, Y_i: Tensor, group: Any = None) -> Tensor:
    """Return the sum of Y_i over the ranks of the group (None: all)."""
    return _Conjugate.apply(
        Y_i, lambda Y_i: (group or ctx.comm).all_reduce(Y_i.clone()), lambda dY: dY
    )


def f_bar(ctx: mk.Context, X_i: Tensor) -> Tensor:
    """Return X, of shape (s, ...), of which each rank has s / t tokens: X_i,
    (s / t, ...).
    """
    return _Conjugate.apply(X_i, ctx.comm.all_gather, ctx.comm.reduce_scatter)


def g_bar(ctx: mk.Context, Y_i: Tensor) -> Tensor:
    """Return this rank's tokens, (s / t, ...), of the sum of Y_i, (s, ...),
    over all ranks.
    """
    return _Conjugate.apply(Y_i, ctx.comm.reduce_scatter, ctx.comm.all_gather)
