"""The most that each rank of a training would hold at a time, played without its memory.

A played training has its storages, though nothing is in them: each is counted from when an operator makes it until
nobody refers to it any more, so that what only exists for a moment (the copies of the logits in a loss's backward, a
gathered layer, an optimizer's square root) is in the peak if that is when the peak is. `benchmarks/memory.py` holds
this to torch.profiler's account of the real training.

Not counted: the batch itself, which lies in the host's memory; what a driver, a communication library or a kernel keeps
for itself, except for convolutions and LSTMs on CPUs (`mpkit.trace.record.workspace`); and an allocator's
fragmentation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mpkit.devices.hardware import Hardware
from mpkit.launch.session.cluster import Cluster
from mpkit.plan.plan import Plan
from mpkit.prediction.dry_run.trace import trace_fake
from mpkit.trace import CATEGORIES, Kind, RankTrace

__all__ = ["held_at_peak", "played_memory"]


def played_memory(
    model_fn: Callable[[], torch.nn.Module], plan: Plan, batch: Any,
    loss: Callable[[Any, Any], torch.Tensor], optimizer: Callable[[Any], torch.optim.Optimizer],
    *, steps: int = 3, hardware: Hardware | str | None = None, cluster: Cluster | None = None,
) -> dict[int, dict[str, int]]:  # fmt: skip
    """Return by rank the bytes of each category at the moment when the rank holds most; they sum to the peak.

    >>> import torch, mpkit as mk
    >>> held = played_memory(
    ...     lambda: torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False)), mk.Plan.zero(3, 4),
    ...     (torch.empty(8, 1024, device="meta"),) * 2, torch.nn.functional.mse_loss, torch.optim.AdamW)
    >>> held[0]["params"], held[0]["optimizer"]  # 4 bytes for each of 2^20 weights, and 8, of which a quarter is here
    (1048576, 2097152)

    Args:
        model_fn, plan, batch, loss, optimizer: as for `mk.trace_fake`.
        steps: the steps in which the peak is looked for; an optimizer's states are there from the second on.
        hardware: the machine; on "cpu" the memory that oneDNN's convolutions and LSTMs take is counted.
        cluster: as for `mk.trace_fake`.
    """
    trace = trace_fake(
        model_fn, plan, batch=batch, loss=loss, optimizer=optimizer, steps=steps, hardware=hardware, cluster=cluster
    )  # fmt: skip
    played = {each: held_at_peak(trace.ranks[each]) for each in sorted(set(trace.meta["fake"]["stands_for"]))}
    return {rank: dict(played[other]) for rank, other in enumerate(trace.meta["fake"]["stands_for"])}


def held_at_peak(rank: RankTrace) -> dict[str, int]:
    """Return what a rank held, by category, when it held most between its first step's begin and its last one's end."""
    memory, steps = rank.memory, rank.ops[rank.ops["kind"] == Kind.STEP]
    levels = np.zeros((len(memory) + 1, len(CATEGORIES)), np.int64)
    levels[np.arange(1, len(memory) + 1), memory["category"]] = memory["delta"]
    levels = levels.cumsum(axis=0)
    first = int(np.searchsorted(memory["time"], steps["start"].min()))
    last = int(np.searchsorted(memory["time"], steps["end"].max(), side="right"))
    most = first + int(levels[first : last + 1].sum(axis=1).argmax())
    return dict(zip(CATEGORIES, levels[most].tolist(), strict=True))
