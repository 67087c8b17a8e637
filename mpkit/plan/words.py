"""A Plan in words: how the model, each layer, the batch and each sequence are divided."""

from __future__ import annotations

from typing import Any

from mpkit.plan.axes import AXES
from mpkit.plan.kinds import every
from mpkit.plan.schedule import Schedule

__all__ = ["describe"]


def describe(plan: Any) -> str:
    """Describe a plan in words, for `Plan.describe`.

    >>> from mpkit.plan.plan import Plan
    >>> print(describe(Plan(dp=4, zero=2, microbatches=2)))
    ZeRO-2 on 4 ranks: each a quarter of every batch, in 2 micro-batches, whose gradients accumulate.
    >>> print(describe(Plan(pp=2, dp=2, tp=2, zero=1, schedule="1f1b", microbatches=4)))
    8 ranks, 2 x 2 x 2 (pp x dp x tp). 1f1b on 2 ranks: the model in 2 stages, each batch in 4 micro-batches. Bubble in
    theory 1/5 = 0.200. ZeRO-1 on 2 ranks: each half of every batch. Each layer is shared by 2 ranks.
    >>> print(describe(Plan(dp=32, zero=3, dp_shard=8)))
    ZeRO-3 on 32 ranks, sharded within 4 groups of 8: each 1/32 of every batch.
    >>> print(describe(Plan(dp=4, ep=2)))
    DDP on 4 ranks: each a quarter of every batch. The experts of each layer are divided among 2 ranks, to which tokens
    go by all-to-alls.
    """
    mesh = plan.mesh
    long = [axis for axis in AXES if mesh.degree(axis) > 1]
    is_replicated, accumulates = plan.dp > 1 or plan.zero, plan.microbatches > 1 and plan.pp == 1
    parts = []
    if len(long) > 1:
        degrees = " x ".join(str(mesh.degree(axis)) for axis in long)
        parts.append(f"{plan.ranks} ranks, {degrees} ({' x '.join(long)}).")
    if plan.pp > 1 or (plan.ranks == 1 and not plan.zero):
        parts.append(_pipeline(plan))
    if is_replicated:
        parts.append(_replicas(plan, accumulates))
    if plan.tp > 1:
        between = ", and between layers each has its part of the sequence" if plan.sequence_parallel else ""
        parts.append(f"Each layer is shared by {plan.tp} ranks{between}.")
    if plan.ep > 1:
        parts.append(
            f"The experts of each layer are divided among {plan.ep} ranks, to which tokens go by all-to-alls."
        )
    if plan.cp > 1:
        parts.append(f"Each sequence is shared by {plan.cp} ranks ({plan.cp_method}, {plan.cp_order}).")
    if accumulates and not is_replicated and plan.ranks > 1:
        parts.append(f"Each batch in {plan.microbatches} micro-batches, whose gradients accumulate.")
    parts += [f"Computes in {plan.precision}."] if plan.precision != "full" else []
    host = {
        "optimizer": "The optimizer is on the host.",
        "params": "Optimizer and parameters are on the host.",
    }
    return " ".join([*parts, *filter(None, [host.get(plan.offload)])])


def _pipeline(plan: Any) -> str:
    if plan.pp == 1:
        title, stages = "Serial on 1 rank", "the whole model"
    else:
        name = plan.schedule.name if isinstance(plan.schedule, Schedule) else plan.schedule
        title, stages = f"{name} on {plan.pp} ranks", f"the model in {plan.stages} stages"
    parts = "whole" if plan.microbatches == 1 else f"in {plan.microbatches} micro-batches"
    blocks = f"activations of one in {every(plan.recompute)} blocks"
    what = {"none": "", "selective": "attentions", "full": "activations"}.get(plan.recompute, blocks)
    again = f", {what} computed again in the backward" if what else ""
    bubble = plan.bubble_in_theory if plan.pp > 1 else None
    theory = "" if bubble is None else f" Bubble in theory {bubble} = {float(bubble):.3f}."
    return f"{title}: {stages}, each batch {parts}{again}.{theory}"


def _replicas(plan: Any, accumulates: bool) -> str:
    name = "DP" if plan.data_parallel == "dp" else f"ZeRO-{plan.zero}" if plan.zero else "DDP"
    share = {1: "the whole", 2: "half", 3: "a third", 4: "a quarter"}.get(plan.dp, f"1/{plan.dp}")
    pieces = f", in {plan.microbatches} micro-batches, whose gradients accumulate" if accumulates else ""
    where = f"on {plan.dp} rank{'s' * (plan.dp > 1)}"
    if plan.dp_shard:
        where += f", sharded within {plan.mesh.dp_replicate} groups of {plan.dp_shard}"
    return f"{name} {where}: each {share} of every batch{pieces}."
