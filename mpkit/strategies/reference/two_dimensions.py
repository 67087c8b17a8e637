"""Two dimensions: a model divided among t ranks (tensor parallelism), in d replicas of
it (data parallelism).

    mesh          rank r has the coordinates (r // t, r % t): t neighbours share a
                  model, every t-th the same part of it
    forward       of b / d samples; f and g in the tensor-parallel group
    backward      likewise
    all-reduce    gradients of this part, over the ranks that have the same part
    update        each rank its part

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", SC 2021, section 2.
"""

from __future__ import annotations

from torch import Tensor, nn

import mpkit as mk
from mpkit.strategies.reference.arguments import Batches, Loss, Optimizer
from mpkit.strategies.reference.tensor.parallel_mlp import parallel_mlp


def train(
    ctx: mk.Context, A: Tensor, B: Tensor, batches: Batches, loss: Loss,
    optimizer: Optimizer, t: int,
) -> list[float]:  # fmt: skip
    """Train an MLP, Z = GeLU(X A) B, and return the loss of this rank's samples
    at each step.

    Args:
        ctx, batches, loss, optimizer: see `mpkit.strategies.reference.arguments`.
        A, B: (h, 4 h) and (4 h, h), whole.
        t: tensor-parallel degree; d = n / t replicas.
    """
    # ---- mesh
    d, replica, i = ctx.world_size // t, ctx.rank // t, ctx.rank % t
    tp = [ctx.comm.group(range(k * t, (k + 1) * t)) for k in range(d)][replica]
    dp = [ctx.comm.group(range(k, ctx.world_size, t)) for k in range(t)][i]
    A_i = nn.Parameter(A.chunk(t, dim=1)[i].clone())
    B_i = nn.Parameter(B.chunk(t)[i].clone())
    update, losses = optimizer([A_i, B_i]), []
    for inputs, targets in batches:
        # ---- forward
        X, y = inputs.chunk(d)[replica], targets.chunk(d)[replica]
        value = loss(parallel_mlp(ctx, X, A_i, B_i, tp), y)
        # ---- backward
        value.backward()
        # ---- all-reduce
        for weight in (A_i, B_i):
            dp.all_reduce(weight.grad, op="mean")
        # ---- update
        update.step()
        update.zero_grad()
        losses.append(value.item())
    return losses
