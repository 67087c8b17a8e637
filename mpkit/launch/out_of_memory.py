"""What a rank held when it ran out of memory, by category, and changes of the plan that would help, with their prices.

The rank reports the picture (`mpkit.strategies.runtime.memory_picture`); the plan is in the trace's meta.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from mpkit.common.units import memory_text
from mpkit.plan.plan import Plan
from mpkit.plan.rules import change_plan
from mpkit.plan.schedule.catalogue import GPIPE, ONE_F_ONE_B, SCHEDULES
from mpkit.trace import CATEGORIES, Trace

__all__ = ["out_of_memory_text"]

MOST = 3
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
        lines += _advice(Plan.from_json(trace.meta["plan"]), held, trace.meta)
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


def _advice(plan: Plan, held: Mapping[str, int], meta: Mapping[str, Any]) -> list[str]:
    """Return the first changes that a Plan accepts, those first that save most of what the rank held most of."""
    activations = held.get("activations", 0)
    whole = activations > sum(held.values()) - activations
    changes = sorted(
        _changes(plan, meta), key=lambda change: change[0] != ("activations" if whole else "states")
    )
    lines: list[str] = []
    for _, why, price, fields in changes:
        with suppress(ValueError):  # a Plan that rejects the combination
            changed = change_plan(plan, **fields)
            if changed != plan and len(lines) < MOST:
                lines.append(f"  {len(lines) + 1}. mk.{changed}: {why} (costs {price})")
    if not lines:
        return [
            "No change of the plan that mpkit knows would save more: more ranks, or a smaller model or batch."
        ]
    head = (
        f"{'Activations take' if whole else 'Parameters, gradients and optimizer states take'} most of it. "
    )
    return [f"{head}What would help {plan}; mk.fits(model, plan) says how much each needs:", *lines]


Change = tuple[str, str, str, dict[str, Any]]
"""What it saves most of, why, its price, and the fields of the plan that it changes."""


def _changes(plan: Plan, meta: Mapping[str, Any]) -> Iterator[Change]:
    """Yield changes of a plan that save memory, the cheaper and larger ones first."""
    m, batch = plan.microbatches, int(meta.get("batch_size") or 0)
    if plan.pp > 1 and isinstance(plan.schedule, str) and SCHEDULES[plan.schedule].holds_all:
        fields = {"schedule": ONE_F_ONE_B, "virtual_stages": 1}
        yield "activations", "activations of p micro-batches, not of m", "nothing", fields
    if plan.ranks == 1:
        fields = {"dp": 2, "zero": 3, "schedule": GPIPE}
        yield "states", "half of the states and of the batch", "a second GPU", fields
    if plan.shards > 1 and plan.zero < 3:
        traffic = "1.5 times the traffic of DDP" if plan.zero == 2 else "as much traffic as DDP"
        what = ("optimizer states", "gradients", "parameters")[plan.zero]
        ddp = {"data_parallel": "ddp"} if plan.data_parallel == "dp" else {}
        yield "states", f"{what} divided by {plan.shards}", traffic, {"zero": plan.zero + 1, **ddp}
    if plan.pp == 1 and plan.dp > 1 and not plan.zero and not 0 < batch < max(m, 2 * plan.dp):
        fields = {"pp": plan.dp, "dp": 1, "schedule": ONE_F_ONE_B, "microbatches": max(m, 2 * plan.dp)}
        yield "states", "a stage in place of a replica", "a bubble", fields
    if not 0 < batch < 2 * m * plan.dp:
        yield "activations", "activations of fewer samples", "smaller kernels", {"microbatches": 2 * m}
    if plan.recompute != "full":
        yield "activations", "activations inside blocks", "one more forward per step", {"recompute": "full"}
    if plan.precision == "full" and meta.get("dtype", "float32") in ("float32", "float64"):
        yield "activations", "activations and gradients in 16 bits", "rounding", {"precision": "bf16"}
    if plan.offload == "none" and meta.get("device") != "cpu":
        yield "states", "optimizer states on the host", "copies, and the CPU's step", {"offload": "optimizer"}
