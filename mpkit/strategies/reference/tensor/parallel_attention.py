"""Self-attention divided by heads: rank i computes a / t of the a heads, and what they
add to the output.

    column parallel   Q_i, K_i, V_i = f(X) [Wq_i, Wk_i, Wv_i]: the columns of
                      this rank's heads
    attention         of each head by itself: softmax(Q K^T / sqrt(d)) V
    row parallel      Z = g(Y_i B_i)

One all-reduce in the forward and one in the backward, as in the MLP.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3, figure 3b.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.reference.tensor.column_parallel_linear import (
    column_parallel_linear,
)
from mpkit.strategies.reference.tensor.row_parallel_linear import row_parallel_linear


def parallel_attention(
    ctx: mk.Context, X: Tensor, W_i: Tensor, B_i: Tensor, heads: int
) -> Tensor:
    """Return Z, of causal attention.

    Args:
        ctx: of this rank.
        X: (b, s, h), the same on every rank.
        W_i: (h, 3 h / t): this rank's columns of Wq, Wk and Wv, side by side.
        B_i: (h / t, h): this rank's rows.
        heads: of this rank, a / t.

    Returns:
        (b, s, h).
    """
    # ---- column parallel
    Q, K, V = column_parallel_linear(ctx, X, W_i).chunk(3, dim=-1)
    # ---- attention
    # (b, a / t, s, d)
    Q, K, V = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (Q, K, V))
    Y_i = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
    Y_i = Y_i.transpose(1, 2).flatten(2)
    # ---- row parallel
    return row_parallel_linear(ctx, Y_i, B_i)
