"""The plan that a trace's program ran, with the evidence for it.

    pipeline       who sends to whom, and in which order each rank runs forwards and backwards   `pipeline`
    replicas       FSDP2's annotations, or reductions of gradients                                `replicas`
    layers         all-reduces within forwards: tensor parallelism
    exchanges      all-to-alls within forwards, for experts or for heads (Ulysses)                `exchanges`
    accumulation   backwards per step
    recomputation  operators that run again within a backward
    world          degrees that together are more than there are ranks contradict each other

Each finding is a sentence with its numbers. What the trace cannot tell is not in the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from mpkit.plan.plan import Plan
from mpkit.timeline.foreign.inference.exchanges import exchanges_of
from mpkit.timeline.foreign.inference.observations import AxisEvidence, ObservedSteps
from mpkit.timeline.foreign.inference.pipeline import InferredPipeline, pipeline_of
from mpkit.timeline.foreign.inference.replicas import replicas_of
from mpkit.trace import Kind, Trace

__all__ = ["InferredStrategy", "infer", "tensor_of"]


@dataclass(frozen=True)
class InferredStrategy:
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


def infer(trace: Trace) -> InferredStrategy:
    """Return the plan of a trace of torch.profiler's, and what it follows from.

    The sizes are those of the communications' groups, so that a few ranks of many tell them as well.

    Args:
        trace: an imported trace.
    """
    seen = ObservedSteps(trace)
    pipeline = pipeline_of(seen.ranks)
    replicas = replicas_of(seen)
    parts = {
        "pp": AxisEvidence() if pipeline is None else _of_pipeline(pipeline),
        "dp": replicas,
        "tp": tensor_of(seen, sharded=bool(replicas.options.get("zero"))),
        "microbatches": _of_accumulation(seen) if pipeline is None else AxisEvidence(),
        "recompute": _of_recomputation(seen),
        "cp": exchanges_of(seen, replicas),
    }
    evidence = [sentence for part in parts.values() for sentence in part.evidence]
    options, contradictions = _within_world(parts, seen.world)
    evidence += contradictions
    try:
        plan = Plan(**options)
    except ValueError as error:
        return InferredStrategy(None, [*evidence, f"These do not make a plan of mpkit's: {error}"])
    if plan.ranks > seen.world:
        return InferredStrategy(None, evidence)
    if trace.meta.get("imported", {}).get("world_size") and plan.ranks < seen.world:
        evidence.append(
            f"This explains {plan.ranks} of {seen.world} ranks: what divides the others does not show in the files at "
            "hand."
        )
    return InferredStrategy(plan, evidence)


def _within_world(parts: Mapping[str, AxisEvidence], world: int) -> tuple[dict[str, Any], list[str]]:
    """Return the options of all parts but for those that contradict the number of ranks, and what to say of it.

    What no library announces goes first.
    """
    kept, sentences = dict(parts), []
    for doubtful in sorted(("dp", "tp"), key=lambda axis: parts[axis].announced):
        options = {name: value for part in kept.values() for name, value in part.options.items()}
        degrees = {axis: options[axis] for axis in AXES if axis in options}
        if prod(degrees.values()) <= world:
            break
        if doubtful in degrees:
            product = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items())
            why = "fits least" if parts[doubtful].announced else "is announced by no library"
            sentences.append(
                f"{product} would be {prod(degrees.values())} ranks, and there are {world}. So {doubtful} is not in "
                f"the plan: it {why}."
            )
            kept[doubtful] = AxisEvidence()
    return {name: value for part in kept.values() for name, value in part.options.items()}, sentences


AXES = ("pp", "dp", "tp", "cp")


# ---- the parts


def _of_pipeline(pipeline: InferredPipeline) -> AxisEvidence:
    options = {
        "pp": pipeline.ranks, "microbatches": pipeline.microbatches, "virtual_stages": pipeline.virtual_stages,
        **({"schedule": pipeline.schedule} if pipeline.schedule else {}),
    }  # fmt: skip
    return AxisEvidence(options, list(pipeline.evidence), announced=True)


def _of_accumulation(seen: ObservedSteps) -> AxisEvidence:
    counts = []
    for rank in seen.ranks:
        actions = rank.ops[
            (rank.ops["depth"] == 0) & np.isin(rank.ops["kind"], (Kind.FORWARD, Kind.BACKWARD))
        ]
        kinds = actions["kind"]
        turns = (kinds == Kind.BACKWARD) & (np.concatenate([[0], kinds[:-1]]) == Kind.FORWARD)
        counts.append(int(turns.sum()))
    each = max(counts, default=0)
    steps = any((rank.ops["kind"] == Kind.STEP).any() for rank in seen.ranks)
    if each < 2 or not steps:
        return AxisEvidence()
    words = f"Each step has {each} forwards, each followed by its backward: {each} micro-batches."
    return AxisEvidence({"microbatches": each}, [words])


def _of_recomputation(seen: ObservedSteps) -> AxisEvidence:
    again = sum(each["recomputed"] for each in seen.library_facts)
    if not again:
        return AxisEvidence()
    words = f"{again:,} operators that autograd records run within backwards: activations are recomputed."
    return AxisEvidence({"recompute": "full"}, [words])


def tensor_of(seen: ObservedSteps, *, sharded: bool) -> AxisEvidence:
    """Find all-reduces within forwards, equally many of one size: those that end a layer divided by rows.

    Args:
        seen: the trace.
        sharded: whether parameters are, so that only a mesh's own word tells a reduction of layers.
    """
    for number in range(len(seen.ranks)):
        found = seen.communications_during(number, Kind.FORWARD, (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER))
        named = [row for row in found if seen.group(number, row)[1] == "tp"]
        redistributed = seen.library_facts[number]["redistributed"] if number < len(seen.library_facts) else 0
        sizes = Counter(int(row["bytes"]) for row in found)
        often = [nbytes for nbytes, count in sizes.items() if count >= 2 and (nbytes > 4096 or redistributed)]
        chosen = named or [row for row in found if int(row["bytes"]) in often]
        if not chosen or (sharded and not named):
            continue
        size = seen.group(number, chosen[0])[0]
        if size > 1:
            how = (
                "its mesh calls the axis tp" if named
                else f"where DTensor redistributes {redistributed:,} times" if redistributed
                else "of equal sizes, as layers divided by rows end"
            )  # fmt: skip
            words = f"{len(chosen)} all-reduces among {size} ranks within the forwards of a step, {how}"
            return AxisEvidence(
                {"tp": size}, [f"{words}: tensor parallelism."], announced=bool(named or redistributed)
            )
    return AxisEvidence()
