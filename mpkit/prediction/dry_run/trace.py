"""The caller's side of `trace_fake`: checks, one real process, and the Trace of all ranks from what it recorded.

Phases:

    check    the plan and the hardware, before a process starts
    play     the ranks that differ, one after the other (`mpkit.prediction.dry_run.play`)
    mirror   every rank gets the records of the one that does the same, rewritten for its own peers

Records name other ranks: the members of a group ("0,2"), the ends of a message ("0>4#F3"), the root of a collective or
the other end of a message (`peer`). Along the axes in which these ranks differ, their coordinates stay the same. Along
all other axes they have the coordinates of the played rank, which are replaced by those of the other rank: so all of
them move by the same number.

    played rank 0 of pp=2, dp=2, tp=2     mirrored to rank 3, at dp 1 and tp 1
    "0,1" (along tp)                      "2,3"
    "0,2" (along dp)                      "1,3"
    "0>4#F3" (along pp)                   "3>7#F3"

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
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mpkit.common.tracebacks import public
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.catalogue.machines import check_enough, enough_a100
from mpkit.devices.hardware import Hardware
from mpkit.launch.session.cluster import Cluster, borrow_cluster
from mpkit.plan.mesh import Mesh
from mpkit.plan.plan import Plan
from mpkit.strategies.prepare.prepare import warn_if_unwise
from mpkit.trace import Kind, RankTrace, Trace

__all__ = ["mirror", "trace_fake"]


@public
def trace_fake(
    model_fn: Callable[[], torch.nn.Module], plan: Plan, *, batch: Any,
    loss: Callable[[Any, Any], torch.Tensor], optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int = 1, hardware: Hardware | str | None = None,
    max_grad_norm: float | None = None, cluster: Cluster | None = None,
) -> Trace:  # fmt: skip
    """Trace what the ranks of a training would do, played by one process on tensors that have shapes and no content.

    The strategy's own code runs, at full size; `Timeline.of` puts its trace on a clock. Only the losses are missing.

    >>> import torch, mpkit as mk
    >>> trace = mk.trace_fake(
    ...     lambda: torch.nn.Sequential(torch.nn.Linear(4096, 4096, bias=False)), mk.Plan.ddp(16),
    ...     batch=(torch.empty(64, 4096, device="meta"), torch.empty(64, 4096, device="meta")),
    ...     loss=torch.nn.functional.mse_loss, optimizer=torch.optim.AdamW)
    >>> mk.Timeline.of(trace).peak_memory[15]["optimizer"] // 2**20  # MiB: AdamW's two moments, 4 bytes each
    128

    >>> plan = mk.Plan(pp=2, dp=2, tp=2, schedule="1f1b", microbatches=4)
    >>> tokens = torch.empty(16, 64, dtype=torch.long, device="meta")
    >>> trace = mk.trace_fake(lambda: mk.models.GPT(layers=2), plan, batch=(tokens, tokens),
    ...     loss=mk.models.next_token_loss, optimizer=torch.optim.AdamW)
    >>> trace.meta["fake"]["stands_for"]
    [0, 0, 0, 0, 4, 4, 4, 4]

    Times within an action are counted by operator: the longer of FLOPs / rate and bytes / bandwidth (the roofline).
    Ranks that do the same are played once. Nothing overflows; gradients are taken to exceed the norm to clip to.

    Args:
        model_fn: makes the model; called where tensors have no content, so that it takes no memory.
        plan: any plan.
        batch: (inputs, targets) of the whole global batch, as for `Cluster.train`, or a function that makes them.
            Only the shapes matter: `torch.empty(..., device="meta")` takes no memory.
        loss: loss(outputs, targets) -> scalar, the mean over the batch, or (total, count).
        optimizer: optimizer(params) -> torch.optim.Optimizer.
        steps: the number of steps. DDP's first step differs from the rest: buckets are rebuilt after it.
        hardware: the machine, a name in `mk.hardware()` or a `Hardware`; None: as many nodes of 8 A100 as it takes.
        max_grad_norm: clip gradients to this norm; None: do not clip.
        cluster: any cluster, whose helper process to use; None: start one.

    Raises:
        ValueError: the machine has too few devices; or the model, batch or loss cannot work.
        RankFailed: the model reads its tensors' values, which are not there.
    """
    from mpkit.prediction.dry_run.play import play

    # ---- check
    _check(model_fn, plan)
    machine = find(hardware or enough_a100(plan.ranks))
    check_enough(machine, plan.ranks, "trace_fake")
    # ---- play
    how = {"loss": loss, "optimizer": optimizer, "steps": steps, "max_grad_norm": max_grad_norm}
    with borrow_cluster(cluster) as used:
        played = used.run(play, model_fn, batch, plan, how, machine.device)[0]
    if isinstance(played, str):
        raise ValueError(played)
    records, stands_for, meta = played
    return _trace_of(records, stands_for, meta, plan, machine)


def _trace_of(
    records: dict[int, RankTrace], stands_for: list[int], meta: dict[str, Any], plan: Plan, machine: Hardware
) -> Trace:
    """Return the Trace of all ranks; its meta says which ranks were played."""
    fake = {
        "played": sorted(records),
        "stands_for": stands_for,
        "device": machine.device.name,
        "clock": "operator by operator: FLOPs or bytes on that device, whichever takes longer",
    }
    of_all = {"world_size": plan.ranks, "device": "cpu", "backend": "fake"}
    return Trace(
        [mirror(records[each], each, rank, plan.mesh) for rank, each in enumerate(stands_for)],
        {**of_all, **meta, "hardware": machine.name, "fake": fake},
    )


def mirror(recorded: RankTrace, rank: int, other: int, mesh: Mesh) -> RankTrace:
    """Return what rank `other` would have recorded, which does the same as the one that was played.

    Args:
        recorded: the records.
        rank: the rank that was played.
        other: the rank to name in its place.
        mesh: of all ranks.
    """
    if other == rank:
        return recorded
    ops, names = recorded.ops, list(recorded.names)
    talks = (ops["kind"] >= Kind.SEND) & (ops["kind"] < Kind.COPY_TO_DEVICE)
    shifts = np.zeros(
        len(names), dtype=np.int64
    )  # by name: how far its members lie from those of the played rank
    for line in np.unique(ops["group"][talks]).tolist():
        text, hash_, tag = names[line].partition("#")
        between = ">" if hash_ else ","
        members = list(map(int, text.split(between)))
        along = zip(
            zip(*map(mesh.coordinates, members), strict=True), mesh.coordinates(other), mesh.coordinates(rank),
            strict=True,
        )  # fmt: skip
        shifts[line] = mesh.rank_at(new if len(set(each)) == 1 else old for each, new, old in along) - rank
        moved = [member + int(shifts[line]) for member in members]
        assert other in moved, f"rank {rank} cannot stand for rank {other} in {text}"
        names[line] = between.join(map(str, moved)) + hash_ + tag
    named = talks & (ops["peer"] >= 0)
    if shifts[ops["group"][named]].any():
        ops = ops.copy()
        ops["peer"][named] += shifts[ops["group"][named]].astype(ops["peer"].dtype)
    return replace(recorded, ops=ops, names=names)


def _check(model_fn: Any, plan: Any) -> None:
    if isinstance(model_fn, torch.nn.Module) or not callable(model_fn):
        raise ValueError(
            f"trace_fake({type(model_fn).__name__}): a function that makes the model is wanted, so that it can be made "
            "without memory: trace_fake(lambda: mpkit.models.GPT(layers=48, width=1600, heads=25), ...)"
        )
    if not isinstance(plan, Plan):
        raise ValueError(f"plan={plan!r}: give a Plan, such as mk.Plan.zero(3, 64)")
    warn_if_unwise(plan)
