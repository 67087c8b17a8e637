"""The MLP of a transformer, Z = GeLU(X A) B: A by columns, B by rows, one
all-reduce per direction.

    column parallel   Y_i = GeLU(f(X) A_i): GeLU works element by element, so rank i can
                      do its columns alone
    row parallel      Z = g(Y_i B_i)

Source: Shoeybi et al., "Megatron-LM", 2019, section 3, figure 3a.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.reference.tensor.column_parallel_linear import (
    column_parallel_linear,
)
from mpkit.strategies.reference.tensor.row_parallel_linear import row_parallel_linear


def parallel_mlp(
    ctx: mk.Context, X: Tensor, A_i: Tensor, B_i: Tensor, group: Any = None
) -> Tensor:
    """Return Z.

    Args:
        ctx: of this rank.
        X: (b, s, h), the same on every rank of the group.
        A_i: (h, 4 h / t), this rank's columns.
        B_i: (4 h / t, h), this rank's rows.
        group: the t ranks; None: all.

    Returns:
        (b, s, h).
    """
    # ---- column parallel
    Y_i = F.gelu(column_parallel_linear(ctx, X, A_i, group))
    # ---- row parallel
    return row_parallel_linear(ctx, Y_i, B_i, group)
