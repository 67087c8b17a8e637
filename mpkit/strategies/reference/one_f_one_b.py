"""1F1B: one forward, one backward, so that a rank holds at most p micro-batches and
not all m.

    warm-up      rank s computes its first min(m, p - 1 - s) forwards
    steady       one forward, then one backward, while there are forwards
    cool-down    the backwards that are left

The bubble is that of GPipe, (p - 1) / (m + p - 1); rank s holds at most
p - s micro-batches.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", SC 2021, section 2.2.1 and figure 4.
"""

from __future__ import annotations

from mpkit.strategies.reference.stage import Stage


def one_f_one_b(stage: Stage) -> None:
    """Compute one step of a stage, with m micro-batches."""
    p, s, m = stage.ctx.world_size, stage.ctx.rank, stage.m
    # ---- warm-up
    warm_up = min(m, p - 1 - s)
    for i in range(warm_up):
        stage.forward(i)
    # ---- steady
    for i in range(warm_up, m):
        stage.forward(i)
        stage.backward(i - warm_up)
    # ---- cool-down
    for i in range(m - warm_up, m):
        stage.backward(i)
