"""A linear layer divided by columns: Y = X A with A = [A_1 ... A_t], so Y_i = X A_i.

    copy       f: X is the same on every rank
    multiply   Y_i = X A_i: rank i has its columns of Y, and nothing is communicated
    (gather    only where the whole Y is needed)

The backward sums the gradient of X over ranks: one all-reduce of X's size.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3, equation 3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import mpkit as mk
from mpkit.strategies.reference.tensor.conjugates import f


def column_parallel_linear(
    ctx: mk.Context, X: Tensor, A_i: Tensor, group: Any = None
) -> Tensor:
    """Return Y_i = X A_i.

    Args:
        ctx: of this rank.
        X: (..., k), the same on every rank of the group.
        A_i: (k, n / t), this rank's columns.
        group: the t ranks; None: all.

    Returns:
        (..., n / t).
    """
    # ---- copy
    X = f(ctx, X, group)
    # ---- multiply
    return X @ A_i
