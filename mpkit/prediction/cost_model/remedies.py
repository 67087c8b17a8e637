"""What may be changed of a plan so that it fits, and what the categories of memory mean."""

from __future__ import annotations

from typing import Any

from mpkit.plan.plan import Plan

__all__ = ["MEANING", "changes"]

MEANING = {
    "params": "the weights that a rank computes with",
    "grads": "the gradients",
    "optimizer": "the optimizer's states and master weights",
    "activations": "what forwards keep for their backwards",
    "logits": "the logits, their copy in 32 bits and its gradient",
    "gathered": "the whole layers that ZeRO-3 gathers",
    "buffers": "what the framework and libraries keep",
    "context": "the CUDA context and NCCL",
}


def changes(plan: Plan, microbatch: int, half: str = "bf16") -> list[tuple[str, dict[str, Any]]]:
    """Return what may be changed of a plan to save memory: in words, and as fields of the plan.

    Args:
        plan: the plan.
        microbatch: samples per micro-batch.
        half: the precision of 16 bits that the device has.
    """
    options: list[tuple[str, dict[str, Any]]] = []
    for k in (2, 4, microbatch):
        if 1 < k <= microbatch and microbatch % k == 0:
            parts = plan.microbatches * k
            options.append((f"microbatches={parts}", {"microbatches": parts}))
    if plan.recompute == "none":
        options += [(f'recompute="{how}"', {"recompute": how}) for how in ("selective", "every=2", "full")]
    elif plan.recompute != "full":
        options.append(('recompute="full"', {"recompute": "full"}))
    if plan.precision == "full":
        options.append((f'precision="{half}"', {"precision": half}))
    if plan.dp * plan.cp > 1:
        options += [(f"zero={stage}", {"zero": stage}) for stage in range(plan.zero + 1, 4)]
    if plan.dp_shard:
        options.append(("dp_shard=None", {"dp_shard": None}))
    if plan.tp > 1 and not plan.sequence_parallel:
        options.append(("sequence_parallel=True", {"sequence_parallel": True}))
    if plan.dp % 2 == 0:
        fewer = {"dp": plan.dp // 2}
        options += [
            (f"tp={2 * plan.tp}, dp={plan.dp // 2}", {"tp": 2 * plan.tp, **fewer}),
            (f"pp={2 * plan.pp}, dp={plan.dp // 2}", {"pp": 2 * plan.pp, **fewer}),
        ]
    if plan.offload == "none":
        options.append(('offload="optimizer"', {"offload": "optimizer"}))
    return options
