"""A linear layer divided by rows: Y = X A with A = [A_1; ...; A_t] and X =
[X_1 ... X_t], so Y = sum of X_i A_i.

    multiply   X_i A_i: rank i has its columns of X, as a column-parallel
               layer leaves them
    reduce     g: the sum over ranks

Source: Shoeybi et al., "Megatron-LM", 2019, section 3, equation 2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import mpkit as mk
from mpkit.strategies.reference.tensor.conjugates import g


def row_parallel_linear(
    ctx: mk.Context, X_i: Tensor, A_i: Tensor, group: Any = None
) -> Tensor:
    """Return Y = X A, whole on every rank.

    Args:
        ctx: of this rank.
        X_i: (..., k / t), this rank's columns.
        A_i: (k / t, n), this rank's rows.
        group: the t ranks; None: all.

    Returns:
        (..., n).
    """
    # ---- multiply
    partial = X_i @ A_i
    # ---- reduce
    return g(ctx, partial, group)
