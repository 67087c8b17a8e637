"""What a Plan leaves open and a file has to say: the batch, the machines, their address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from mpkit.errors import ArgumentError
from mpkit.plan.kinds import whole

if TYPE_CHECKING:
    from mpkit.plan.plan import Plan


WORDS = ("model", "script", "master")
PER_NODE = 8  # most machines have no more GPUs


@dataclass(frozen=True)
class ExportRequest:
    """A Plan, and what is written beside it.

    Attributes:
        plan: the plan.
        micro_batch: samples per micro-batch and replica; 1 if neither it nor global_batch is given.
        global_batch: samples per optimizer step: micro_batch x microbatches x dp.
        nodes, gpus_per_node: the machines; their product is the number of ranks.
        sequence: tokens per sample.
        model: the name of the model.
        script: the program that the ranks run.
        master, port: the address of the first node.
    """

    plan: Plan
    micro_batch: int
    global_batch: int
    nodes: int
    gpus_per_node: int
    sequence: int = 4096
    model: str = "model"
    script: str = "train.py"
    master: str = "localhost"
    port: int = 29500

    @classmethod
    def from_plan(cls, plan: Plan, format: str, given: Mapping[str, Any]) -> ExportRequest:
        """Check what was given, and fill in the rest.

        Raises:
            ValueError: there is no such argument, or numbers do not multiply to the plan's.

        >>> from mpkit.plan.plan import Plan
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
        # ---- the batch
        parts, micro = plan.dp * plan.microbatches, said.get("micro_batch")
        total = said.get("global_batch", (micro or 1) * parts)
        if total % parts or (micro is not None and micro * parts != total):
            fit = micro or max(1, round(total / parts))
            raise ValueError(
                f"plan.to({format!r}, global_batch={total}): {plan!r} divides a batch into dp x microbatches = "
                f"{plan.dp} x {plan.microbatches} parts, so the global batch is {parts} times the micro-batch: "
                f"global_batch={fit * parts}, which is micro_batch={fit}"
            )
        # ---- the machines
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
