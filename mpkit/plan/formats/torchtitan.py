"""What the fields of torchtitan's configuration (0.3, Python) say together: all axes, torch's schedules, FSDP."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from mpkit.plan.formats.python_code import assignments, python_code
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Page
from mpkit.plan.formats.table import RANKS, Fields, FormatCode, Values, number_of
from mpkit.plan.schedule.catalogue import ANY, ONE_F_ONE_B, SCHEDULES, names_in_torch

__all__ = ["TORCHTITAN"]

CLASSES = {"parallelism": "ParallelismConfig", "training": "TrainingConfig"}
P, T, RECOMPUTED = "parallelism", "training", "activation_checkpoint"


def _names(asked: ExportRequest) -> Mapping[str, Any]:
    plan, known = asked.plan, names_in_torch()
    if plan.pp == 1:
        return {"torch_schedule": None}
    # torchtitan gives looped schedules 2 stages per rank
    named = isinstance(plan.schedule, str) and (
        SCHEDULES[plan.schedule].per_rank != ANY or plan.virtual_stages > 1
    )
    return {"torch_schedule": known.get(str(plan.schedule) if named else "", known[ONE_F_ONE_B])}


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    if (torchs := values.get(f"{P}.pipeline_parallel_schedule")) is not None:
        ours = {theirs.lower(): name for name, theirs in names_in_torch().items()}
        if (name := ours.get(str(torchs).lower())) is None:
            raise ValueError(
                f"torchtitan: pipeline_parallel_schedule = {torchs!r:.80}: one of "
                f"{', '.join(names_in_torch().values())}"
            )
        fields |= {"schedule": name} | ({"virtual_stages": 2} if SCHEDULES[name].per_rank == ANY else {})
    replicate = number_of(values.get(f"{P}.data_parallel_replicate_degree", 1))
    shard = _count_shards(values, fields, replicate, notes)
    if shard > 1 and replicate > 1:
        fields["dp_shard"] = shard
    pipelined, policy = fields.get("pp", 1) > 1, values.get(f"{P}.fsdp_reshard_after_forward", "default")
    if shard * fields.get("cp", 1) > 1 or fields.get("offload") == "params":  # ranks of cp are sharded too
        fields["zero"] = 2 if policy == "never" or (policy == "default" and pipelined) else 3
    fields["dp"] = shard * replicate
    fields.setdefault("precision", "bf16")  # torchtitan's defaults
    if pipelined:
        fields.setdefault("schedule", ONE_F_ONE_B)
    fields["sequence_parallel"] = fields.get("tp", 1) > 1 and fields.get("sequence_parallel", True)
    if fields.get("ep", 1) > 1 and fields["sequence_parallel"]:
        fields["etp"] = 1
    local = number_of(values.get(f"{T}.local_batch_size", 8))
    if fields.get("pp", 1) * fields.get("virtual_stages", 1) > 1:
        parts = local // number_of(values.get(f"{P}.pipeline_parallel_microbatch_size", 1))
    else:
        total = values.get(f"{T}.global_batch_size", -1)
        parts = 1 if total == -1 else number_of(total) // (local * fields["dp"])
    return fields | {"microbatches": max(1, parts)}


def _count_shards(values: Values, fields: Fields, replicate: int, notes: list[str]) -> int:
    """Return the replicas that shard; -1, which is the default, is whatever ranks remain."""
    said = values.get(f"{P}.data_parallel_shard_degree", -1)
    if said != -1:
        return number_of(said)
    others = prod(fields.get(axis, 1) for axis in ("pp", "tp", "cp")) * replicate
    if RANKS not in values:
        notes.append("data_parallel_shard_degree is left open: read as 1; Plan.read(..., ranks=8) says it")
    shards, rest = divmod(values.get(RANKS, others), others)
    if rest:
        raise ValueError(f"torchtitan: ranks={values[RANKS]} is not a multiple of {others}: ranks={others}")
    return int(shards)


def _body(page: Page) -> str:
    names = ["from torchtitan.config import ParallelismConfig, TrainingConfig"]
    if RECOMPUTED in page.values:
        names.append("from torchtitan.distributed.activation_checkpoint import FullAC")
    return "\n".join([*names, "", assignments(page, CLASSES)])


TORCHTITAN = FormatCode(python_code(_body, CLASSES), _finish, _names)
