"""What a rank held when it ran out of memory, by category, and which changes of the plan would help most.

The rank reports the picture (`mpkit.strategies.runtime.memory_picture`); the plan is in the trace's meta.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpkit.common.units import memory_text
from mpkit.timeline.memory_savings import MemorySaving, Situation, savings
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
    now = Situation.from_meta(trace.meta, trace.world_size, rank, held)
    if now is None:
        lines.append(
            "What would help: fewer samples at once, sharded states, recomputed activations; `mpkit doctor oom`."
        )
    else:
        lines += _advice(now)
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


def _advice(now: Situation) -> list[str]:
    found = savings(now)
    if not found:
        return [
            "No change of the plan that mpkit knows would save more: more ranks, or a smaller model or batch."
        ]
    states, activations = now.model_states(now.plan), now.activations(now.plan)
    assumed = "" if now.states_known else ", with an optimizer like Adam, which is assumed"
    head = (
        f"{now.plan} needs {memory_text(states)} per step for parameters, gradients and optimizer states (by the "
        f"formulas{assumed}) and had {memory_text(activations)} of activations. What would help most, predicted:"
    )
    return [head, *(_line(number, saving) for number, saving in enumerate(found[:MOST], 1))]


def _line(number: int, saving: MemorySaving) -> str:
    return f"  {number}. mk.{saving.plan}: {memory_text(saving.nbytes)} less ({saving.why}; costs {saving.price})"
