"""What a rank held when it ran out of memory, by category, and a change of the plan that would help.

The rank reports the picture (`mpkit.strategies.runtime.memory_picture`); the plan is in the trace's meta.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mpkit.common.units import memory_text
from mpkit.plan.plan import Plan
from mpkit.plan.rules import change_plan
from mpkit.trace import CATEGORIES, Trace

__all__ = ["out_of_memory_text"]

BAR = 24


def out_of_memory_text(rank: int, picture: Mapping[str, Mapping[str, int]], trace: Trace) -> str:
    """Return the picture and the advice as text.

    Args:
        rank: the rank that ran out of memory.
        picture: what `picture_of` returned there.
        trace: the trace, whose meta has the plan if there was one.
    """
    held = picture["held"]
    lines = [f"What rank {rank} held then, by category (the recorder's ledger):", *_bars(held)]
    lines += _allocator(picture.get("device") or {}, sum(held.values()))
    if "plan" not in trace.meta:
        lines.append(
            "What would help: fewer samples at once, sharded states, recomputed activations; `mpkit doctor oom`."
        )
    else:
        lines.append(_advice(Plan.from_json(trace.meta["plan"]), held))
    return "\n".join(lines)


def _bars(held: Mapping[str, int]) -> list[str]:
    total = sum(held.values())
    rows = [*((category, held.get(category, 0)) for category in CATEGORIES), ("in all", total)]
    return [
        f"  {name:<12}{memory_text(nbytes, total):>9}  {'█' * round(BAR * nbytes / total) if total else ''}".rstrip()
        for name, nbytes in rows
    ]


def _allocator(device: Mapping[str, int], held: int) -> list[str]:
    if not device:
        return []
    others = device["total"] - device["free"] - device["reserved"]
    kept = device["reserved"] - device["allocated"]
    return [
        f"The GPU has {memory_text(device['total'])}: torch allocated {memory_text(device['allocated'])} "
        f"({memory_text(max(0, device['allocated'] - held))} of it in no category: workspaces, temporaries), keeps "
        f"{memory_text(kept)} unused, and {memory_text(others)} are CUDA's own and other programs'."
        + (
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes use of what is kept."
            if kept > held / 4
            else ""
        )
    ]


def _advice(plan: Plan, held: Mapping[str, int]) -> str:
    """Return the first change that the plan accepts, of those that save what the rank held most of.

    >>> print(_advice(Plan(dp=2), {"params": 2, "activations": 1}))
    Parameters, gradients and optimizer states take most of it. What would help: mk.Plan(dp=2, zero=1). mk.fits(model, \
plan, ...) says how much a rank then needs, and what else would help.
    """
    activations = held.get("activations", 0)
    changes: tuple[dict[str, Any], ...]
    if activations > sum(held.values()) - activations:
        what, changes = "Activations take", ({"recompute": "full"}, {"microbatches": 2 * plan.microbatches})
    else:
        what = "Parameters, gradients and optimizer states take"
        sharded = {"zero": min(plan.zero + 1, 3), "data_parallel": "ddp"} if plan.shards > 1 else {}
        changes = {"dp": 2, "zero": 3} if plan.ranks == 1 else sharded, {"offload": "optimizer"}
    for fields in changes:
        with suppress(ValueError):  # a Plan that rejects the combination
            changed = change_plan(plan, **fields)
            if changed != plan:
                return f"{what} most of it. What would help: mk.{changed}. {HOW_MUCH}"
    return f"{what} most of it: more ranks, or a smaller model or batch. {HOW_MUCH}"


HOW_MUCH = "mk.fits(model, plan, ...) says how much a rank then needs, and what else would help."
