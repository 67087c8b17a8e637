"""The plan that a trace's program ran, with the evidence for it.

    pipeline       who sends to whom, and in which order each rank runs forwards and backwards   `pipeline`
    replicas       FSDP2's annotations, or all-reduces of gradients in DDP's buckets
    tensor         all-reduces within forwards
    accumulation   backwards per step
    recomputation  operators that run again within a backward

Each finding is a sentence with its numbers. What the trace cannot tell is not in the plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.kineto.inference.buckets import describe_buckets
from mpkit.kineto.inference.pipeline import Pipeline, pipeline_of
from mpkit.plan.plan import Plan
from mpkit.trace import Kind, RankTrace, Trace

__all__ = ["Inferred", "infer"]

Array = npt.NDArray[Any]
_ELEMENTS = re.compile(r"\[([0-9]{1,15})\]$")


@dataclass(frozen=True)
class Inferred:
    """What `infer` found.

    Attributes:
        plan: the plan; None if what was found makes none.
        evidence: a sentence for each thing that was found.
    """

    plan: Plan | None
    evidence: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = repr(self.plan) if self.plan is not None else "No plan follows from this trace."
        return "\n".join([head, *(f"- {sentence}" for sentence in self.evidence)])


def infer(trace: Trace) -> Inferred:
    """Return the plan of a trace of torch.profiler's, and what it follows from.

    The sizes are those of the communications' groups, so that a few ranks of many tell them as well.

    Args:
        trace: an imported trace.
    """
    evidence: list[str] = []
    ranks = [_last_step(rank) for rank in trace.ranks]
    options: dict[str, Any] = {}
    pipeline = pipeline_of(ranks)
    if pipeline is not None:
        options |= _of_pipeline(pipeline, evidence)
    options |= _of_replicas(trace, ranks, evidence)
    options |= _of_tensor(trace, ranks, options, evidence)
    if pipeline is None:
        options |= _of_accumulation(trace, ranks, evidence)
    again = sum(each["recomputed"] for each in trace.meta.get("imported", {}).get("said", []))
    if again:
        options["recompute"] = "full"
        evidence.append(
            f"{again:,} operators that autograd records run within backwards: activations are recomputed."
        )
    world = trace.meta.get("imported", {}).get("world_size")
    try:
        plan = Plan(**options)
    except ValueError as error:
        return Inferred(None, [*evidence, f"These do not make a plan of mpkit's: {error}"])
    if world and plan.ranks != world:
        evidence.append(
            f"This explains {plan.ranks} of {world} ranks: what divides the others does not show in the files at hand."
        )
    return Inferred(plan, evidence)


def _last_step(rank: RankTrace) -> RankTrace:
    """Return a rank's records of its last step; all if there are no steps."""
    steps = rank.ops["step"][rank.ops["kind"] == Kind.STEP]
    ops = rank.ops[rank.ops["step"] == steps.max()] if len(steps) else rank.ops
    return RankTrace(ops, rank.memory[:0], rank.names)


# ---- the parts


def _of_pipeline(pipeline: Pipeline, evidence: list[str]) -> dict[str, Any]:
    evidence += pipeline.evidence
    return {
        "pp": pipeline.ranks, "microbatches": pipeline.microbatches, "virtual_stages": pipeline.virtual_stages,
        **({"schedule": pipeline.schedule} if pipeline.schedule else {}),
    }  # fmt: skip


def _of_replicas(trace: Trace, ranks: Sequence[RankTrace], evidence: list[str]) -> dict[str, Any]:
    said = trace.meta.get("imported", {}).get("said", [])
    steps = max((each["steps"] for each in said), default=0) or 1
    layers = {layer: count for each in said for layer, count in each["fsdp"]["gathers"].items()}
    if layers:
        size = _usual_size(trace, ranks, [r.ops[r.ops["kind"] == Kind.ALL_GATHER] for r in ranks])
        each = max(layers.values()) / steps
        zero = 3 if each > 1 else 2
        again = "again in the backward" if zero == 3 else "and keeps them for the backward"
        evidence.append(
            f"FSDP2 gathers {len(layers)} groups of parameters ({_some(layers)}) among {size} ranks in the forward, "
            f"{again} ({each:g} gathers of each per step): ZeRO-{zero}."
        )
        return {"dp": size, "zero": zero}
    reduced = [_in_backward(rank) for rank in ranks]
    if not any(len(ops) for ops in reduced):
        return {}
    size = _usual_size(trace, ranks, reduced)
    if size < 2:
        return {}
    called = sum(each["ddp"] for each in said)
    first = next((i for i, ops in enumerate(reduced) if len(ops)), 0)
    if called:
        each = called / max(len(said), 1) / steps
        often = "once" if each == 1 else f"{each:g} times"
        evidence.append(f"DistributedDataParallel.forward is called {often} per step.")
    elif not _like_buckets(reduced[first]):
        return {}
    gradients = said[first]["gradients"] if said else []
    evidence.append(describe_buckets(_payloads(ranks[first], reduced[first]), gradients, size))
    return {"dp": size}


def _of_tensor(
    trace: Trace, ranks: Sequence[RankTrace], options: dict[str, Any], evidence: list[str]
) -> dict[str, Any]:
    """Find all-reduces within forwards, equally many of one size: those that end a layer divided by rows."""
    for number, rank in enumerate(ranks):
        found = _within(rank, Kind.FORWARD, (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER))
        named = [row for row in found if _known(trace, number, rank, row)[1] == "tp"]
        sizes = Counter(int(row["bytes"]) for row in found)
        often = [nbytes for nbytes, count in sizes.items() if count >= 2 and nbytes > 4096]
        chosen = named or [row for row in found if int(row["bytes"]) in often]
        if not chosen or ("dp" in options and not named and "zero" in options):
            continue
        size = _known(trace, number, rank, chosen[0])[0]
        if size > 1:
            how = "its mesh calls the axis tp" if named else "of equal sizes, as layers divided by rows end"
            evidence.append(
                f"{len(chosen)} all-reduces among {size} ranks within the forwards of a step, {how}: "
                "tensor parallelism."
            )
            return {"tp": size}
    return {}


def _of_accumulation(trace: Trace, ranks: Sequence[RankTrace], evidence: list[str]) -> dict[str, Any]:
    counts = []
    for rank in ranks:
        actions = rank.ops[
            (rank.ops["depth"] == 0) & np.isin(rank.ops["kind"], (Kind.FORWARD, Kind.BACKWARD))
        ]
        kinds = actions["kind"]
        turns = (kinds == Kind.BACKWARD) & (np.concatenate([[0], kinds[:-1]]) == Kind.FORWARD)
        counts.append(int(turns.sum()))
    each = max(counts, default=0)
    steps = any((rank.ops["kind"] == Kind.STEP).any() for rank in ranks)
    if each < 2 or not steps:
        return {}
    evidence.append(f"Each step has {each} forwards, each followed by its backward: {each} micro-batches.")
    return {"microbatches": each}


# ---- what they look at


def _within(rank: RankTrace, kind: Kind, communications: Sequence[Kind]) -> Array:
    """Return the communications of these kinds that begin within actions of this kind."""
    actions = rank.ops[(rank.ops["kind"] == kind) & (rank.ops["depth"] == 0)]
    comm = rank.ops[np.isin(rank.ops["kind"], communications)]
    if not len(actions) or not len(comm):
        return comm[:0]
    at = np.searchsorted(actions["start"], comm["start"], side="right") - 1
    inside = (at >= 0) & (comm["start"] <= actions["end"][np.maximum(at, 0)])
    found: Array = comm[inside]
    return found


def _in_backward(rank: RankTrace) -> Array:
    """Return the all-reduces from the beginning of the first backward to the optimizer's step, in order."""
    ops = rank.ops
    backward = ops[(ops["kind"] == Kind.BACKWARD) & (ops["depth"] == 0)]
    updates = ops[(ops["kind"] == Kind.OPTIMIZER) & (ops["depth"] == 0)]
    if not len(backward):
        return ops[:0]
    end = int(updates["end"].max()) if len(updates) else 2**62
    chosen = (
        (ops["kind"] == Kind.ALL_REDUCE) & (ops["start"] >= backward["start"].min()) & (ops["start"] <= end)
    )
    found: Array = ops[chosen]
    return found


def _like_buckets(ops: Array) -> bool:
    return len(ops) > 0 and int(ops["bytes"].sum()) > 1024


def _payloads(rank: RankTrace, ops: Array) -> list[tuple[int, int]]:
    """Return bytes and elements of each communication; the elements are in its name, "float[12]"."""
    found = []
    for row in ops:
        name = rank.name(int(row["name"]))
        inside = _ELEMENTS.search(name)
        found.append((int(row["bytes"]), int(inside[1]) if inside else 0))
    return found


def _known(trace: Trace, number: int, rank: RankTrace, row: Any) -> tuple[int, str]:
    """Return the size of a communication's group, absent ranks too, and its axis of the program's mesh."""
    group = rank.name(int(row["group"]))
    known = trace.meta.get("imported", {}).get("groups", [])
    groups = known[number] if number < len(known) else {}
    size, axis = groups.get(f"{Kind(int(row['kind'])).word} {group}", (len(group.split(",")), ""))
    return int(size), str(axis)


def _usual_size(trace: Trace, ranks: Sequence[RankTrace], chosen: Sequence[Array]) -> int:
    """Return the size of the groups that carry most bytes of these communications of each rank; 1 if there are none."""
    sizes: Counter[int] = Counter()
    for number, (rank, ops) in enumerate(zip(ranks, chosen, strict=True)):
        for row in ops:
            sizes[_known(trace, number, rank, row)[0]] += int(row["bytes"]) + 1
    return sizes.most_common(1)[0][0] if sizes else 1


def _some(names: Sequence[str] | dict[str, int]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")
