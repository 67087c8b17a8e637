"""How replicas stay equal: FSDP2, ZeRO with its optimizer's states divided, or all-reduces of gradients.

FSDP2     annotations; with an all-reduce of each shard besides, shards of replicas (hybrid)
ZeRO-1    reduce-scatters in the backward, and gathers of the new weights; or torch's ZeroRedundancyOptimizer
DDP       its annotation; without it, all-reduces of as many elements as there are gradients
buckets   DDP's gradients in the order in which the backward makes them, cut where a bucket is full

Source of the buckets: Li et al. 2020, section 3.2.3; torch's reducer.cpp, `compute_bucket_assignment_by_size`: the
first bucket is of 1 MiB and more, the others of `bucket_cap_mb`, 25 MiB unless the program says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from mpkit.timeline.foreign.inference.observations import AxisEvidence, ObservedSteps, some
from mpkit.trace import Kind

__all__ = ["describe_buckets", "fits_gradients", "replicas_of"]


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


_MIB = 2**20


def fits_gradients(buckets: Sequence[int], gradients: Sequence[int]) -> bool:
    """Say whether buckets are consecutive parts of gradients in the order of the backward.

    >>> fits_gradients([30, 12], [10, 20, 5, 7]), fits_gradients([25, 17], [10, 20, 5, 7])
    (True, False)

    Args:
        buckets: elements of each bucket.
        gradients: elements of each gradient.
    """
    return bool(buckets) and set(accumulate(buckets)) <= set(accumulate(gradients))


def describe_buckets(
    payloads: Sequence[tuple[int, int]], gradients: Sequence[int], ranks: int, *, ddp: bool = True
) -> str:
    """Return a sentence on the all-reduces of a step's backward.

    Args:
        payloads: bytes and elements of each.
        gradients: elements of each gradient in the order of the backward; empty if unknown.
        ranks: how many ranks reduce.
        ddp: whether the program says that DDP does.

    >>> describe_buckets([(120, 30), (48, 12)], [10, 20, 5, 7], 2)
    "2 all-reduces among 2 ranks in the backward, of 30 and 12 elements: DDP's buckets, each of which ends with a \
parameter in the order of the backward."
    """
    many = "s" * (len(payloads) > 1)
    start = f"{len(payloads)} all-reduce{many} among {ranks} ranks in the backward"
    if not all(nbytes for nbytes, _ in payloads):
        return f"{start}, of a size that is not in the file: as DDP reduces gradients in buckets."
    elements = [count for _, count in payloads]
    each = ", ".join(f"{count:,}" for count in elements[:8]) + (", ..." if len(elements) > 8 else "")
    each = " and ".join(each.rsplit(", ", 1)) if len(elements) <= 8 else each
    start += f", of {each} elements"
    if fits_gradients(elements, gradients):
        return f"{start}: DDP's buckets, each of which ends with a parameter in the order of the backward."
    if not ddp and len(elements) == len(gradients):
        return f"{start}, as many as there are gradients: a reduction of each parameter's own."
    sizes = ", ".join(f"{nbytes / _MIB:.3g}" for nbytes, _ in payloads[:8])
    return f"{start} ({sum(elements):,} in all; {sizes} MiB): as DDP reduces gradients in buckets."
