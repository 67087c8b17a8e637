"""The plan that the libraries of a trace's program announce, and what they leave open.

    replicas       DistributedDataParallel.forward; FSDP2's gathers by layer; ZeroRedundancyOptimizer
    meshes         a DeviceMesh's axis in the description of a process group: tp, cp, ep, dp
    left           messages, and communication within forwards and backwards that none of these explains: then no plan
                   follows, and `mk.open(path, plan=...)` takes the plan of who knows the program

Sizes of groups count absent ranks too, so that a few ranks of many tell them as well.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpkit.plan.mesh import axis_of
from mpkit.plan.plan import Plan
from mpkit.timeline.foreign.kineto import PATTERNS, Events
from mpkit.trace import Kind, RankTrace, Trace

_AXES = {"tp": "tp", "cp": "cp", "sp": "cp", "ep": "ep", "dp": "dp"}
"""By the name of a mesh's axis, the degree of a plan that it is."""

FEW = 1024
"""Bytes up to which a collective is of a loss or of a norm, and divides nothing."""

MESSAGES = (Kind.SEND, Kind.RECV)
ACTIONS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


@dataclass(frozen=True)
class InferredStrategy:
    """The plan that libraries announce (None if what they announce does not explain the trace), with evidence.

    `evidence` has a sentence for each thing that was found or is left open.
    """

    plan: Plan | None
    evidence: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = repr(self.plan) if self.plan is not None else "No plan follows from this trace."
        return "\n".join([head, *(f"- {sentence}" for sentence in self.evidence)])


class Call(NamedTuple):
    """A communication of a rank's last step."""

    kind: Kind
    size: int  # ranks of its group, absent ones too
    axis: str  # the mesh axis of the group; "" if unknown
    nbytes: int
    phase: int  # the kind of action within which it begins; -1: none


def count_announcements(events: Events) -> dict[str, Any]:
    """Count, as JSON types, what annotations announce in one rank's file: calls of DDP's forward; FSDP2's gathers by
    layer; profiled steps; and the optimizer's class.
    """
    words = Counter(events.names[number] for number in events["annotation"].name.tolist())
    optimizers = (match[1] for word in words if (match := re.fullmatch(r"Optimizer\.step#(.*)\.step", word)))
    return {
        "ddp": words["DistributedDataParallel.forward"],
        "fsdp": {match[1]: n for word, n in words.items() if (match := PATTERNS["fsdp"].match(word))},
        "steps": sum(n for word, n in words.items() if PATTERNS["step"].match(word)),
        "optimizer": next(optimizers, ""),
    }


def infer(trace: Trace) -> InferredStrategy:
    """Return the plan that the libraries of an imported trace's program announce, and what it follows from."""
    imported = trace.meta.get("imported", {})
    ranks = [_last_step(rank) for rank in trace.ranks]
    facts, groups = list(imported.get("said", [])), list(imported.get("groups", [])) or [{} for _ in ranks]
    calls = [_calls(rank, mine) for rank, mine in zip(ranks, groups, strict=True)]
    everything = [call for mine in calls for call in mine]
    options: dict[str, Any] = {}
    evidence: list[str] = []
    for found, sentences in (_meshes(everything), _fsdp(facts, everything), _ddp(facts, everything)):
        options = found | options
        evidence += sentences
    fsdp, ddp = (any(each[what] for each in facts) for what in ("fsdp", "ddp"))
    left = [*dict.fromkeys(sentence for mine in calls for sentence in _left(mine, options, fsdp, ddp))]
    evidence += left
    world = int(imported.get("world_size") or trace.world_size)
    try:
        plan = Plan(**options)
    except ValueError as error:
        return InferredStrategy(None, [*evidence, f"These do not make a plan of mpkit's: {error}"])
    if plan.ranks > world and not left:
        degrees = " x ".join(f"{axis}={options[axis]}" for axis in ("dp", "tp", "cp") if axis in options)
        left = [f"{degrees} would be {plan.ranks} ranks, and there are {world}."]
        evidence += left
    if imported.get("world_size") and plan.ranks < world and not left:
        what = "what divides the others is not in the files at hand"
        evidence.append(f"This explains {plan.ranks} of {world} ranks: {what}.")
    return InferredStrategy(None if left else plan, evidence)


def _last_step(rank: RankTrace) -> RankTrace:
    steps = rank.ops["step"][rank.ops["kind"] == Kind.STEP]
    ops = rank.ops[rank.ops["step"] == steps.max()] if len(steps) else rank.ops
    return RankTrace(ops, rank.memory[:0], rank.names)


def _calls(rank: RankTrace, groups: dict[str, Any]) -> list[Call]:
    ops, found = rank.ops, []
    actions = ops[(ops["depth"] == 0) & np.isin(ops["kind"], ACTIONS)]
    comm = ops[(ops["kind"] >= Kind.SEND) & (ops["kind"] < Kind.BARRIER)]
    at = np.searchsorted(actions["start"], comm["start"], side="right") - 1
    for row, place in zip(comm, at.tolist(), strict=True):
        inside = place >= 0 and row["start"] <= actions["end"][place]
        name, kind = rank.name(int(row["group"])), Kind(int(row["kind"]))
        size, axis = groups.get(f"{kind.word} {name}", (len(name.split(",")), ""))
        size, phase = 2 if kind in MESSAGES else int(size), int(actions["kind"][place]) if inside else -1
        found.append(Call(kind, size, str(axis), int(row["bytes"]), phase))
    return found


# ---- what is announced: the options of the plan that follow, and a sentence for each

Found = tuple[dict[str, Any], list[str]]


def _meshes(calls: list[Call]) -> Found:
    """Return the degrees of axes that a DeviceMesh names, along which something is sent."""
    options, evidence = dict[str, Any](), []
    for name, degree in _AXES.items():
        mine = [call for call in calls if call.axis == name and call.size > 1]
        if not mine or degree in options:
            continue
        size = Counter(call.size for call in mine).most_common(1)[0][0]
        options[degree] = size
        kinds = ", ".join(sorted({call.kind.word.replace("_", "-") for call in mine}))
        if degree == "cp" and any(call.kind == Kind.ALL_TO_ALL for call in mine):
            options["cp_method"] = "ulysses"
        along = f"an axis {name} of {size} ranks ({kinds} along it)"
        evidence.append(f"The program's mesh has {along}: {degree}={size}.")
    return options, evidence


def _fsdp(facts: list[dict[str, Any]], calls: list[Call]) -> Found:
    """Return what FSDP2's annotations say."""
    layers = {layer: count for each in facts for layer, count in each["fsdp"].items()}
    gathers = [call for call in calls if call.kind == Kind.ALL_GATHER]
    if not layers or not gathers:
        return {}, []
    sizes = Counter[int]()  # bytes by the size of the group
    for call in gathers:
        sizes[call.size] += call.nbytes + 1
    shards = sizes.most_common(1)[0][0]
    each = max(layers.values()) / (max(fact["steps"] for fact in facts) or 1)
    zero = 3 if each > 1 else 2
    again = "again in the backward" if zero == 3 else "and keeps them for the backward"
    names = ", ".join([*layers][:3]) + (", ..." if len(layers) > 3 else "")
    evidence = [
        f"FSDP2 gathers {len(layers)} groups of parameters ({names}) among {shards} ranks in the forward, {again} "
        f"({each:g} gathers of each per step): ZeRO-{zero}."
    ]
    return {"dp": shards, "zero": zero}, evidence


def _ddp(facts: list[dict[str, Any]], calls: list[Call]) -> Found:
    """Return what DDP's annotation says, and torch's optimizer that is divided among replicas."""
    called = sum(each["ddp"] for each in facts)
    reduced = Counter(call.size for call in _gradients(calls))
    if not called or not reduced or reduced.most_common(1)[0][0] < 2:
        return {}, []
    size, count = reduced.most_common(1)[0]
    each = called / len(facts) / (max(fact["steps"] for fact in facts) or 1)
    often = "once" if each == 1 else f"{each:g} times"
    many = "s" * (count > len(facts))
    evidence = [
        f"DistributedDataParallel.forward is called {often} per step; {count // len(facts)} all-reduce{many} among "
        f"{size} ranks follow{'' if many else 's'} in the backward: dp={size}."
    ]
    options = {"dp": size} | ({"microbatches": int(each)} if each > 1 and not each % 1 else {})
    if any(fact["optimizer"] == "ZeroRedundancyOptimizer" for fact in facts):
        evidence.append("ZeroRedundancyOptimizer updates a part on each rank, and broadcasts it: ZeRO-1.")
        options["zero"] = 1
    return options, evidence


def _gradients(calls: list[Call]) -> list[Call]:
    """Return the all-reduces outside of forwards, but for those of a size that forwards reduce: of divided layers."""
    reduced = [call for call in calls if call.kind == Kind.ALL_REDUCE]
    mirrored = {call.nbytes for call in reduced if call.phase == Kind.FORWARD and call.nbytes}
    outside = (call for call in reduced if call.phase != Kind.FORWARD and call.axis not in ("tp", "cp", "ep"))
    return [call for call in outside if call.nbytes not in mirrored]


# ---- what is left open


def _left(calls: list[Call], options: dict[str, Any], fsdp: bool, ddp: bool) -> list[str]:
    """Return a sentence for each kind of communication within forwards and backwards that nothing announces."""
    known_axes = {name for name, degree in _AXES.items() if degree in options}
    gradients = {id(call) for call in _gradients(calls)}
    left: dict[tuple[Kind, int, Kind], list[int]] = {}
    for call in calls:
        is_message = call.kind in MESSAGES
        explained = (
            call.size < 2
            or call.axis in known_axes
            or (not is_message and (call.phase < 0 or 0 < call.nbytes <= FEW))
            or (fsdp and call.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER))
            or (ddp and (call.kind == Kind.BROADCAST or id(call) in gradients))
        )
        if not explained:
            phase = Kind.FORWARD if call.phase == Kind.FORWARD or is_message else Kind.BACKWARD
            left.setdefault((call.kind, call.size, phase), []).append(call.nbytes)
    return [
        f"{len(sizes)} {kind.word.replace('_', '-')}s among {size} ranks"
        + f" within {phase.word}s" * (kind not in MESSAGES)
        + ", which no library names. You know the program: mk.open(path, plan=mk.Plan(...))."
        for (kind, size, phase), sizes in sorted(left.items())
    ]


# ---- whether views may name groups by it


def plan_of_mesh(trace: Trace, plan: Plan | None) -> Plan | None:
    """Return the plan if all of its ranks are in the trace, in the order of its mesh; else None.

    Ranks of a mesh are numbered with pp outermost and tp innermost. A program may number them otherwise: then some
    group spans axes of which it should know only one.
    """
    if plan is None or plan.ranks != trace.world_size or plan.ranks == 1:
        return None
    for number, rank in enumerate(trace.ranks):
        comm = rank.ops[(rank.ops["kind"] >= Kind.SEND) & (rank.ops["kind"] <= Kind.BARRIER)]
        exchanged = {int(row["group"]) for row in comm if row["kind"] == Kind.ALL_TO_ALL}
        for line in {int(group) for group in comm["group"]}:
            words = rank.name(line).partition("#")[0]
            members = sorted(int(part) for part in words.replace(">", ",").split(",") if part.isdigit())
            if len(members) < 2 or len(members) == plan.ranks:
                continue
            axis = axis_of(plan.mesh, members, exchange=line in exchanged)
            # Messages run along pp; other groups along one axis, or two, as the replicas of a norm do.
            if (
                axis != "pp"
                if ">" in words
                else sorted(plan.mesh.group(number, *axis.split(" x "))) != members
            ):
                return None
    return plan
