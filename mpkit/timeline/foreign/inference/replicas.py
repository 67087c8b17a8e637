"""How replicas stay equal: FSDP2, ZeRO with its optimizer's states divided, or all-reduces of gradients.

FSDP2     annotations; with an all-reduce of each shard besides, shards of replicas (hybrid)
ZeRO-1    reduce-scatters in the backward, and gathers of the new weights; or torch's ZeroRedundancyOptimizer
DDP       its annotation; without it, all-reduces of as many elements as there are gradients
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mpkit.timeline.foreign.inference.buckets import describe_buckets, fits_gradients
from mpkit.timeline.foreign.inference.observations import AxisEvidence, ObservedSteps, some
from mpkit.trace import Kind

__all__ = ["replicas_of"]

Array = npt.NDArray[np.void]


def replicas_of(seen: ObservedSteps) -> AxisEvidence:
    """Return what a trace says of its replicas."""
    return _fsdp(seen) or _divided_optimizer(seen) or _all_reduced(seen) or AxisEvidence()


def _fsdp(seen: ObservedSteps) -> AxisEvidence | None:
    layers = {layer: count for each in seen.library_facts for layer, count in each["fsdp"]["gathers"].items()}
    if not layers:
        return None
    size = seen.usual_size(rank.ops[rank.ops["kind"] == Kind.ALL_GATHER] for rank in seen.ranks)
    each = max(layers.values()) / seen.steps
    zero = 3 if each > 1 else 2
    again = "again in the backward" if zero == 3 else "and keeps them for the backward"
    shards, replicas = _hybrid(seen, size)
    evidence = [
        f"FSDP2 gathers {len(layers)} groups of parameters ({some(layers)}) among {shards} ranks in the forward, "
        f"{again} ({each:g} gathers of each per step): ZeRO-{zero}."
    ]
    if replicas > 1:
        evidence.append(
            f"It reduces each shard among {replicas} ranks as well: hybrid shards, {replicas} copies of {shards} "
            f"shards, which is dp_shard={shards}, dp_replicate={replicas}."
        )
    groups = {"dp_shard": shards, "dp_replicate": replicas} if replicas > 1 else {}
    return AxisEvidence({"dp": shards * replicas, "zero": zero, **groups}, evidence, announced=True)


def _hybrid(seen: ObservedSteps, size: int) -> tuple[int, int]:
    """Return among how many ranks parameters are sharded, and how many ranks have the same shard.

    After each reduce-scatter of the backward hybrid shards have an all-reduce of the shard, which is so many times
    smaller. That holds as well where the file does not tell the ranks of a group.
    """
    scatters, sums = seen.reductions(0, Kind.REDUCE_SCATTER), seen.reductions(0, Kind.ALL_REDUCE)
    if not len(scatters) or len(sums) < len(scatters) or not sums["bytes"].all():
        return size, 1
    parts = np.unique(scatters["bytes"] / sums["bytes"][: len(scatters)])
    if len(parts) != 1 or parts[0] < 2 or parts[0] % 1:
        return size, 1
    shards, among = int(parts[0]), seen.group(0, scatters[0])[0]
    replicas = seen.group(0, sums[0])[0] if among == shards else among // shards
    return shards, max(replicas, 1)


def _divided_optimizer(seen: ObservedSteps) -> AxisEvidence | None:
    """Find gradients that are reduced to shards in the backward, and new weights that are gathered after the update."""
    for number in range(len(seen.ranks)):
        scatters = seen.reductions(number, Kind.REDUCE_SCATTER)
        gathers = seen.between_steps(number, Kind.ALL_GATHER)
        inside = seen.communications_during(number, Kind.FORWARD, (Kind.REDUCE_SCATTER,))
        reduced, gathered = int(scatters["bytes"].sum()), int(gathers["bytes"].sum())
        # Weights may have half the bytes of their gradients, or the other way round.
        if not gathered or len(inside) or not any(0.99 < reduced * k / gathered < 1.01 for k in (0.5, 1, 2)):
            continue
        size = seen.usual_size([*[scatters[:0]] * number, scatters])
        words = (
            f"{len(scatters)} reduce-scatters of gradients in the backward and {len(gathers)} all-gathers of as many "
            f"weights after the update, among {size} ranks: an optimizer divided among replicas, ZeRO-1 (or 2: whether "
            "gradients stay whole meanwhile is not in the file)."
        )
        return AxisEvidence({"dp": size, "zero": 1}, [words]) if size > 1 else None
    return None


def _all_reduced(seen: ObservedSteps) -> AxisEvidence | None:
    reduced = [_without_mirrored(seen, number) for number in range(len(seen.ranks))]
    size, called = seen.usual_size(reduced), sum(each["ddp"] for each in seen.library_facts)
    if size < 2:
        return None
    first = next(number for number, ops in enumerate(reduced) if len(ops))
    payloads = seen.payloads(first, reduced[first])
    gradients = seen.library_facts[first]["gradients"] if seen.library_facts else []
    evidence = []
    if called:
        each = called / max(len(seen.library_facts), 1) / seen.steps
        often = "once" if each == 1 else f"{each:g} times"
        evidence.append(f"DistributedDataParallel.forward is called {often} per step.")
    elif sum(nbytes for nbytes, _ in payloads) <= 1024:
        return None
    elif gradients and not _are_gradients([count for _, count in payloads], gradients):
        words = (
            f"{len(payloads)} all-reduces in the backward have {sum(count for _, count in payloads):,} elements, and "
            f"the gradients {sum(gradients):,}: they are not read as data parallelism."
        )
        return AxisEvidence({}, [words])
    evidence.append(describe_buckets(payloads, gradients, size, ddp=bool(called)))
    zero = {}
    if any(each["optimizer"] == "ZeroRedundancyOptimizer" for each in seen.library_facts):
        evidence.append("ZeroRedundancyOptimizer updates a part on each rank, and broadcasts it: ZeRO-1.")
        zero = {"zero": 1}
    return AxisEvidence({"dp": size, **zero}, evidence, announced=bool(called))


def _without_mirrored(seen: ObservedSteps, number: int) -> Array:
    """Return a rank's all-reduces of the backward but for those of a size that its forwards reduce as well.

    Those are of layers that are divided, whose backward reduces the gradients of their inputs.
    """
    reduced = seen.reductions(number)
    forward = seen.communications_during(number, Kind.FORWARD, (Kind.ALL_REDUCE,))
    mirrored = (reduced["bytes"] > 0) & np.isin(reduced["bytes"], forward["bytes"])
    return np.asarray(reduced[~mirrored])


def _are_gradients(elements: Sequence[int], gradients: Sequence[int]) -> bool:
    """Say whether reductions are of all gradients, each once, or of some in the order of the backward."""
    whole = sum(elements)
    return fits_gradients(elements, gradients) or (whole > 0 and sum(gradients) % whole == 0)
