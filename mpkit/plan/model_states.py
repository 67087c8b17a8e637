"""The bytes of parameters, gradients and optimizer states that a rank holds under a plan: the ZeRO paper's formulas.

The table stands in `mpkit.prediction.experiments.memory_by_strategy`, which compares it with what ranks hold.

Source: Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
2020, figure 1 and section 3.1.
"""

from __future__ import annotations

from mpkit.plan.plan import Plan

__all__ = ["formula"]


def formula(plan: Plan, psi: int, states: float = 2, rank: int = 0, itemsize: int = 4) -> dict[str, float]:
    """Compute the bytes of params, grads and optimizer that a rank holds, as in the table above.

    >>> zero = formula(Plan(dp=64, zero=1, precision="bf16"), psi=7_500_000_000, itemsize=2)
    >>> round(sum(zero.values()) / 1e9, 1)  # table 1 of the ZeRO paper, 7.5 B parameters on 64 GPUs
    31.4

    Args:
        plan: the plan whose strategy to use.
        psi: the number of parameters.
        states: the numbers s that the optimizer keeps per parameter.
        rank: the rank's number.
        itemsize: b, the bytes per parameter in the precision of the computation.
    """
    n = plan.shards  # the ranks of a sequence hold the same parameters, and shard them too
    narrow = plan.precision != "full"
    b, kept = itemsize, (4 * (states + 1) if narrow else itemsize * states)
    optimizer = kept * psi / (n if plan.zero >= 1 else 1)
    if plan.offload != "none" or (plan.data_parallel == "dp" and n > 1 and rank > 0):
        optimizer = 0.0
    params = 0.0 if plan.offload == "params" else b * psi / (n if plan.zero == 3 else 1)
    return {"params": params, "grads": b * psi / (n if plan.zero >= 2 else 1), "optimizer": optimizer}
