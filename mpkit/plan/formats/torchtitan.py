"""What the fields of torchtitan's configuration say together: all axes, torch's schedules, FSDP.

It is Python in a recipe since 0.3, and was TOML before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from mpkit.plan.formats.keys import RANKS, Fields, FormatCode, FormatKey, Values, bool_of, number_of
from mpkit.plan.formats.python_code import assignments
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Page, Word, agree
from mpkit.plan.rules import call_of
from mpkit.plan.schedule.catalogue import ANY, ONE_F_ONE_B, SCHEDULES, has_pairs, names_in

__all__ = ["SECTIONS", "TORCHTITAN", "rename_older"]

SECTIONS = {"parallelism": "ParallelismConfig", "training": "TrainingConfig"}
P, T, SELECTIVE = "parallelism", "training", "activation_checkpoint"
DDP_BUCKET = 100
"""MiB of a bucket of torchtitan's DDP, which no key says, before 0.3."""
OVERLAP = f"{P}.pipeline_parallel_expert_parallel_overlap"
"""Of versions before 0.3, where it is on by default; later ones have left it out."""

OLDER = {
    f"{section}.{name}": f"{P}.{name}"
    for section, names in {
        T: ("tensor_parallel_degree", "data_parallel_replicate_degree", "data_parallel_shard_degree",
            "enable_loss_parallel", "fsdp_reshard_after_forward"),
        "experimental": ("pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_microbatches",
                         "pipeline_parallel_split_points", "context_parallel_degree"),
    }.items()
    for name in names
} | {f"{T}.data_parallel_degree": f"{P}.data_parallel_shard_degree"}  # fmt: skip
"""Keys of 2024 in TOML, and their names since."""


def rename_older(values: dict[str, Any], keys: Sequence[FormatKey]) -> dict[str, Any]:
    """Return the values of TOML, as torchtitan was configured before 0.3, with the defaults of that time.

    Other programs have TOML too: a default is added to torchtitan's own keys alone.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        agree(found, OLDER.get(name, name), value)
    if found.keys() & {key.name for key in keys}:
        found.setdefault(f"{SELECTIVE}.mode", "selective")
    return found


def _names(asked: ExportRequest) -> Mapping[str, Any]:
    plan = asked.plan
    if plan.pp == 1:
        return {"torch_schedule": None}
    plain = (known := names_in("torchtitan"))[ONE_F_ONE_B]
    if not isinstance(plan.schedule, str):
        return {"torch_schedule": plain}
    # torchtitan gives looped schedules 2 stages per rank
    looped = SCHEDULES[plan.schedule].per_rank == ANY and plan.virtual_stages == 1
    return {"torch_schedule": plain if looped else known.get(plan.schedule, plain)}


def _read_schedule(value: Any) -> Mapping[str, Any]:
    ours = {theirs.lower(): name for name, theirs in names_in("torchtitan").items()}
    value = str(value).lower().replace("_", "")  # as in interleaved_1f1b, of 2024
    if value not in ours:
        raise ValueError(f"one of {', '.join(names_in('torchtitan').values())}")
    name = ours[value]
    return {"schedule": name} | ({"virtual_stages": 2} if SCHEDULES[name].per_rank == ANY else {})


def _read_degree(value: Any) -> Mapping[str, Any]:
    if value != -1:
        number_of(value)
    return {}


def _read_recompute(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Word) and not value.startswith(("FullAC.", "SelectiveAC.")):
        raise ValueError(value.reason)
    return {"recompute": "full"} if str(value).startswith("FullAC") else {}


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    replicate = number_of(values.get(f"{P}.data_parallel_replicate_degree", 1))
    shard = _count_shards(values, fields, replicate, notes)
    if values.get(f"{T}.data_parallel_type") == "ddp":
        shard, replicate = 1, shard * replicate
    if shard > 1 and replicate > 1:
        fields |= {"dp_shard": shard, "dp_replicate": replicate}
    pipelined, policy = fields.get("pp", 1) > 1, values.get(f"{P}.fsdp_reshard_after_forward", "default")
    if shard * fields.get("cp", 1) > 1 or fields.get("offload") == "params":  # ranks of cp are sharded too
        fields["zero"] = 2 if policy == "never" or (policy == "default" and pipelined) else 3
    fields["dp"] = shard * replicate
    fields.setdefault("precision", "bf16")  # torchtitan's defaults
    if pipelined:
        fields.setdefault("schedule", ONE_F_ONE_B)
    if OVERLAP in values and not bool_of(values[OVERLAP]) and has_pairs(fields.get("schedule", ONE_F_ONE_B)):
        notes.append(f"{OVERLAP} = False runs pairs apart; those of a Plan hide their all-to-alls")
    if fields.get("tp", 1) == 1:
        fields.pop("sequence_parallel", None)
    elif f"{P}.enable_sequence_parallel" not in values:
        fields["sequence_parallel"] = True
    if fields.get("ep", 1) > 1 and fields.get("tp", 1) > 1 and fields.get("sequence_parallel"):
        fields.setdefault("etp", 1)
    if fields.get("tp", 1) == 1 or fields.get("ep", 1) == 1:
        fields.pop("etp", None)
    if replicate > 1 and not fields.get("zero") and f"{SELECTIVE}.mode" in values:  # TOML has it
        fields["bucket_mb"] = DDP_BUCKET
    return fields | _read_selective(values, notes) | {"microbatches": _count_microbatches(values, fields)}


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


def _count_microbatches(values: Values, fields: Fields) -> int:
    stages = fields.get("pp", 1) * fields.get("virtual_stages", 1)
    local = number_of(values.get(f"{T}.local_batch_size", values.get(f"{T}.batch_size", 8)))
    if stages == 1:
        total = values.get(f"{T}.global_batch_size", -1)
        return max(1, 1 if total == -1 else number_of(total) // (local * fields["dp"]))
    if f"{T}.batch_size" in values or f"{P}.pipeline_parallel_microbatches" in values:  # until 2025
        return number_of(values.get(f"{P}.pipeline_parallel_microbatches", stages))
    return max(1, local // number_of(values.get(f"{P}.pipeline_parallel_microbatch_size", 1)))


def _read_selective(values: Values, notes: list[str]) -> Fields:
    """Return what is recomputed of some layers, or by operators, which a Plan does not have."""
    ac, option = values.get(SELECTIVE), str(values.get(f"{SELECTIVE}.selective_ac_option", "2"))
    is_selective = values.get(f"{SELECTIVE}.mode", "none") == "selective"
    if is_selective and option.isdecimal() and int(option):
        return {"recompute": "full" if int(option) == 1 else f"every={int(option)}"}
    if is_selective or str(ac or "").startswith("SelectiveAC"):
        notes.append("selective recomputation by operators is not read: a Plan's is of attentions")
    return {}


def _check(asked: ExportRequest) -> None:
    inner = (plan := asked.plan).cp * plan.tp
    if plan.etp == 1 and plan.ep % inner:
        fits = plan.mesh.edp * plan.ep // inner * inner
        raise ValueError(
            f"{call_of(plan)}: in torchtitan all {inner} ranks along cp and tp are among those that divide experts: "
            f"{call_of(plan, {'ep': fits})}"
        )


def _say_pairs_run_apart(asked: ExportRequest) -> str:
    plan = asked.plan
    if plan.ep == 1 or plan.pp == 1 or not has_pairs(plan.schedule):
        return ""
    return (
        "torchtitan 0.3 runs the forward and the backward of a pair one after the other, so that their all-to-alls are "
        f"not hidden; versions before it hid them ({OVERLAP})"
    )


def _body(page: Page) -> str:
    names = ["from torchtitan.config import ParallelismConfig, TrainingConfig"]
    if SELECTIVE in page.values:
        names.append("from torchtitan.distributed.activation_checkpoint import FullAC")
    return "\n".join([*names, "", assignments(page, SECTIONS)])


TORCHTITAN = FormatCode(
    _finish,
    _check,
    _say_pairs_run_apart,
    _names,
    readers={
        "@recompute": _read_recompute,
        "@mode": lambda value: {"recompute": "full"} if value == "full" else {},
        "@degree": _read_degree,
        "@schedule": _read_schedule,
    },
    body=_body,
)
