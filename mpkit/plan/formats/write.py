"""A Plan written as a framework's configuration, with what it leaves open: the batch, the machines, their address."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from mpkit.common.tracebacks import level_of_user
from mpkit.errors import ArgumentError
from mpkit.plan.formats.frameworks import format_of
from mpkit.plan.formats.syntax import Page
from mpkit.plan.formats.table import Format, Values
from mpkit.plan.kinds import whole
from mpkit.plan.plan import Config, Plan
from mpkit.plan.schedule.catalogue import has_pairs

WORDS = ("model", "script", "master")
PER_NODE = 8  # most machines have no more GPUs


@dataclass(frozen=True)
class ExportRequest:
    """A Plan, and what is written beside it."""

    plan: Plan
    micro_batch: int  # samples per micro-batch and replica
    global_batch: int  # samples per optimizer step: micro_batch x microbatches x dp
    nodes: int
    gpus_per_node: int  # nodes x gpus_per_node is the number of ranks
    sequence: int = 4096  # tokens per sample
    model: str = "model"
    script: str = "train.py"
    master: str = "localhost"  # the address of the first node, with port
    port: int = 29500

    @classmethod
    def from_plan(cls, plan: Plan, format: str, given: Mapping[str, Any]) -> ExportRequest:
        """Check the given arguments and fill in the rest: a micro-batch of 1, and at most 8 GPUs per node.

        >>> asked = ExportRequest.from_plan(Plan.ddp(16, microbatches=2), "torchrun", {"global_batch": 64})
        >>> asked.nodes, asked.gpus_per_node, asked.micro_batch, asked.master
        (2, 8, 2, 'node0')
        """
        names = [field.name for field in fields(cls)][1:]
        said = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            call = f"plan.to({format!r}, {name}={value!r})"
            if name not in names:
                near = get_close_matches(name, names, 1, 0.5)
                hint = f"; did you mean {near[0]}={value!r}?" if near else "."
                raise ArgumentError(f"{call}: there is no such argument{hint} There are {', '.join(names)}")
            if name in said and name not in WORDS and (whole(value) or 0) < 1:
                raise ValueError(f"{call}: a whole number, 1 or more: {name}=4")
            if name in said and name in WORDS and not (isinstance(value, str) and _is_plain(value)):
                raise ValueError(f"{call}: a name without spaces or quotes: {name}='node0'")
        parts, micro = plan.dp * plan.microbatches, said.get("micro_batch")
        total = said.get("global_batch", (micro or 1) * parts)
        if total % parts or (micro is not None and micro * parts != total):
            fit = micro or max(1, round(total / parts))
            raise ValueError(
                f"plan.to({format!r}, global_batch={total}): {plan!r} divides a batch into dp x microbatches = "
                f"{plan.dp} x {plan.microbatches} parts, so the global batch is {parts} times the micro-batch: "
                f"global_batch={fit * parts}, which is micro_batch={fit}"
            )
        ranks = plan.ranks
        fit = max(n for n in range(1, PER_NODE + 1) if ranks % n == 0)
        each = said.get("gpus_per_node") or (ranks // said["nodes"] if "nodes" in said else fit)
        nodes = said.get("nodes") or ranks // each
        if nodes * each != ranks:
            asked = ", ".join(f"{name}={said[name]}" for name in ("nodes", "gpus_per_node") if name in said)
            raise ValueError(
                f"plan.to({format!r}, {asked}): {plan!r} has {ranks} ranks, one per GPU: nodes={ranks // fit}, "
                f"gpus_per_node={fit}"
            )
        said |= {"micro_batch": total // parts, "global_batch": total, "nodes": nodes, "gpus_per_node": each}
        return cls(plan, **({"master": "node0" if nodes > 1 else "localhost"} | said))


def _is_plain(name: str) -> bool:
    return bool(name) and name.isprintable() and not set(name) & set(" \"'`$\\#;&|<>()")


def write(plan: Plan, name: str, **context: Any) -> Config:
    """Return a plan as a configuration, for `Plan.to`."""
    chosen = format_of(name)
    asked, values, cannot = _export(plan, chosen, context)
    shown, silent = {field: getattr(plan, field) for field in cannot}, _no_effect(plan)
    effects = [f"{field}={shown[field]!r}: {why}" for field, why in cannot.items() if field not in silent]
    header = [f"{chosen.title}, written by mpkit from {plan!r}".replace("\n", " ")]
    if effects:
        header += ["Not said here:", *(f"  {each}" for each in effects)]
        said = "; ".join(effects)
        warnings.warn(f"{chosen.title} cannot say all of {plan!r}. {said}", stacklevel=level_of_user())
    comments = {name: chosen.keys[name].comment for name in values}
    page = Page(asked, values, comments, header)
    config = Config(chosen.syntax.dump(page))
    config.kind, config.annotated = name, chosen.syntax.annotate(page)
    config.comments, config.cannot_say = comments, cannot
    return config


def unsaid(plan: Plan, name: str) -> str:
    """Return why a framework's file cannot say all of a plan; "" if it can.

    >>> unsaid(Plan(dp=8, zero=3), "fsdp"), unsaid(Plan(dp=8, zero=1), "fsdp")[:34]
    ('', 'fully_shard shards gradients at le')
    """
    try:
        _, _, cannot = _export(plan, format_of(name), {})
    except ValueError as error:
        return str(error).removeprefix(f"{plan!r}: ")
    return "; ".join(reason for field, reason in cannot.items() if field not in _no_effect(plan))


def _export(
    plan: Plan, chosen: Format, context: dict[str, Any]
) -> tuple[ExportRequest, Values, dict[str, str]]:
    """Return the request, the values to write, and the fields that come back with another value, each with why."""
    asked = ExportRequest.from_plan(plan, chosen.name, context)
    chosen.check(asked)
    values = chosen.values_of(asked)
    back, silent = vars(Plan(**chosen.fields_of(values, []))), _no_effect(plan)
    lost = [field.name for field in fields(plan) if getattr(plan, field.name) != back[field.name]]
    return asked, values, {name: silent.get(name) or chosen.why_not(name) for name in lost}


def _no_effect(plan: Plan) -> dict[str, str]:
    """Return the fields that change nothing in this plan, with the reason."""
    reasons: dict[str, str] = {}
    if plan.stages == 1 and not has_pairs(plan.schedule):
        reasons |= dict.fromkeys(("schedule", "virtual_stages", "cut"), "no effect: the model is one stage")
    if plan.dp * plan.cp == 1:
        alone = "no effect: there is one replica"
        reasons |= dict.fromkeys(("bucket_mb", "batchnorm", "data_parallel"), alone)
        reasons |= {"zero": alone} if plan.offload == "none" else {}
    if plan.cp == 1:
        reasons |= dict.fromkeys(("cp_order", "cp_method"), "no effect: sequences are whole")
    if plan.tp == 1:
        reasons["tensor"] = "no effect: layers are whole"
    if plan.zero != 3:
        reasons["prefetch"] = "no effect: only ZeRO-3 gathers parameters"
    return reasons
