"""Sequence parallelism: LayerNorm, which tensor parallelism computes t times over,
divided by tokens: s / t per rank.

    normalize         each rank its own tokens
    column parallel   f_bar: the tokens come together; Y_i = GeLU(X A_i)
    row parallel      g_bar: the sums of Y_i B_i go to the ranks that have the tokens
    add               the residual, each rank its own tokens

A reduce-scatter and an all-gather are what an all-reduce consists of: the volume stays,
and a rank keeps 1 / t of the activations between the layers.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", MLSys 2023, section 4.2.2.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.reference.tensor.conjugates import f_bar, g_bar


def sequence_parallel_mlp(
    ctx: mk.Context, X_i: Tensor, A_i: Tensor, B_i: Tensor
) -> Tensor:
    """Return this rank's tokens of X + MLP(LayerNorm(X)).

    Args:
        ctx: of this rank.
        X_i: (s / t, b, h), this rank's tokens.
        A_i: (h, 4 h / t), this rank's columns.
        B_i: (4 h / t, h), this rank's rows.

    Returns:
        (s / t, b, h).
    """
    # ---- normalize
    normalized = F.layer_norm(X_i, X_i.shape[-1:])
    # ---- column parallel
    Y_i = F.gelu(f_bar(ctx, normalized) @ A_i)
    # ---- row parallel
    Z_i = g_bar(ctx, Y_i @ B_i)
    # ---- add
    return X_i + Z_i
