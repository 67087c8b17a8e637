"""torchtitan's configuration (0.3 and later: Python in a recipe): all axes, torch's schedules, FSDP."""

from __future__ import annotations

from math import prod
from typing import Any

from mpkit.plan.formats.keys import (
    RANKS,
    Fields,
    Format,
    FormatKey,
    Values,
    bool_of,
    choice,
    context,
    number,
    number_of,
    older_key,
)
from mpkit.plan.formats.python_code import assignments, python_code
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Page
from mpkit.plan.formats.word import Word, agree
from mpkit.plan.plan import Plan
from mpkit.plan.rules import call_of
from mpkit.plan.schedule.catalogue import ANY, ONE_F_ONE_B, SCHEDULES, has_pairs, names_in

__all__ = ["TORCHTITAN"]

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


def _rename_older(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of TOML, as torchtitan was configured before 0.3, with the defaults of that time.

    Other programs have TOML too: a default is added to torchtitan's own keys alone.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        agree(found, OLDER.get(name, name), value)
    if found.keys() & {key.name for key in TORCHTITAN.keys}:
        found.setdefault(f"{SELECTIVE}.mode", "selective")
    return found


def _schedule(asked: ExportRequest) -> str | None:
    plan = asked.plan
    if plan.pp == 1:
        return None
    plain = (known := names_in("torchtitan"))[ONE_F_ONE_B]
    if not isinstance(plan.schedule, str):
        return plain
    # torchtitan gives looped schedules 2 stages per rank
    looped = SCHEDULES[plan.schedule].per_rank == ANY and plan.virtual_stages == 1
    return plain if looped else known.get(plan.schedule, plain)


def _degrees(plan: Plan) -> tuple[int, int]:
    """Return the replicas that hold everything, and those that shard everything."""
    return (plan.mesh.dp_replicate, plan.mesh.dp_shard) if plan.zero > 1 else (plan.dp, 1)


def _read_schedule(value: Any) -> dict[str, Any]:
    ours = {theirs.lower(): name for name, theirs in names_in("torchtitan").items()}
    value = str(value).lower().replace("_", "")  # as in interleaved_1f1b, of 2024
    if value not in ours:
        raise ValueError(f"one of {', '.join(names_in('torchtitan').values())}")
    name = ours[value]
    return {"schedule": name} | ({"virtual_stages": 2} if SCHEDULES[name].per_rank == ANY else {})


def _degree(value: Any) -> dict[str, Any]:
    if value != -1:
        number_of(value)
    return {}


def _recompute(value: Any) -> dict[str, Any]:
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
    ac, option = values.get("activation_checkpoint"), str(values.get(f"{SELECTIVE}.selective_ac_option", "2"))
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
    if "activation_checkpoint" in page.values:
        names.append("from torchtitan.distributed.activation_checkpoint import FullAC")
    return "\n".join([*names, "", assignments(page, SECTIONS)])


TORCHTITAN = Format(
    "torchtitan",
    "torchtitan's configuration (fields of a Trainer.Config)",
    python_code(_body, {name: section for section, name in SECTIONS.items()}, _rename_older),
    (
        FormatKey("activation_checkpoint", "recomputes each block in the backward",
            lambda asked: "FullAC.Config" if asked.plan.recompute == "full" else None, _recompute, ("recompute",)),
        older_key(f"{SELECTIVE}.mode", ("recompute",), lambda value: {"recompute": "full"} if value == "full" else {}),
        *(context(name, "as older versions say it", lambda asked: None) for name in (
            f"{SELECTIVE}.selective_ac_option", f"{T}.batch_size", f"{T}.data_parallel_type",
            f"{P}.pipeline_parallel_microbatches",
        )),
        older_key(f"{P}.expert_tensor_parallel_degree", ("etp",), lambda value: {"etp": number_of(value)}),
        FormatKey(f"{P}.data_parallel_replicate_degree", "replicas, or groups of them, that hold everything",
            lambda asked: _degrees(asked.plan)[0], _degree, ("dp_replicate",)),
        FormatKey(f"{P}.data_parallel_shard_degree", "replicas that shard everything (FSDP)",
            lambda asked: _degrees(asked.plan)[1], _degree, ("zero", "dp_shard")),
        context(f"{P}.fsdp_reshard_after_forward", "always: ZeRO-3; never: gathered parameters stay until the backward",
                lambda asked: {2: "never", 3: "always"}.get(asked.plan.zero)),
        number(f"{P}.tensor_parallel_degree", "tp", "ranks that share each layer"),
        FormatKey(f"{P}.enable_sequence_parallel", "divides the sequence between layers too",
            lambda asked: asked.plan.sequence_parallel if asked.plan.tp > 1 else None,
            lambda value: {"sequence_parallel": bool_of(value)}, ("sequence_parallel",)),
        number(f"{P}.context_parallel_degree", "cp", "ranks that share each sequence"),
        choice(f"{P}.context_parallel_load_balancer", "cp_order", {"zigzag": "headtail"},
               "headtail: zigzag; without it contiguous", when=lambda asked: asked.plan.cp_order == "zigzag"),
        number(f"{P}.expert_parallel_degree", "ep", "ranks, out of the replicas, that divide each layer's experts",
               lambda asked: asked.plan.ep > 1),
        number(f"{P}.pipeline_parallel_degree", "pp", "pipeline ranks"),
        FormatKey(f"{P}.pipeline_parallel_schedule", "torch's schedule", _schedule, _read_schedule, ("schedule",)),
        context(OVERLAP, "hides the all-to-alls of pairs", lambda asked: None, (bool,)),
        context(f"{P}.pipeline_parallel_microbatch_size", "samples per micro-batch and replica",
                lambda asked: asked.micro_batch if asked.plan.pp > 1 else None, (int,)),
        context(f"{T}.local_batch_size", "samples per replica (and micro-batch, without a pipeline)",
                lambda asked: asked.micro_batch * (asked.plan.microbatches if asked.plan.pp > 1 else 1), (int,)),
        context(f"{T}.global_batch_size", "samples per optimizer step", lambda asked: asked.global_batch),
        context(f"{T}.seq_len", "tokens per sample", lambda asked: asked.sequence, (int,)),
        choice(f"{T}.mixed_precision_param", "precision", {"full": "float32", "bf16": "bfloat16"},
               "what it computes in", otherwise="bfloat16"),
        FormatKey(f"{T}.enable_cpu_offload", "parameters, gradients and optimizer on the host",
            lambda asked: True if asked.plan.offload == "params" else None,
            lambda value: {"offload": "params"} if bool_of(value) else {}, ("offload",)),
    ),
    _finish,
    {
        "schedule": "a schedule by name is one of torch's; any other goes through a file: "
        "plan.build().to_csv('schedule.csv'), and pipeline_parallel_schedule_csv='schedule.csv'",
        "virtual_stages": "looped schedules have 2 stages per rank, or what pipeline_parallel_layers_per_stage says",
        "cut": "module_fqns_per_model_part lists the modules of each stage by name",
        "zero": "replicas shard everything (FSDP) or nothing: zero=0, 2 or 3; ranks that share a sequence always do",
        "recompute": "all blocks (FullAC), or by operators (SelectiveAC), not attentions or every k-th block",
        "offload": "CPU offload is of all states, under FSDP",
        "precision": "it computes in bfloat16 or float32",
        "bucket_mb": "DDP's buckets are not in the configuration",
        "cp_order": "context_parallel_load_balancer is headtail (zigzag), or ptrr for masks of blocks",
        "cp_method": "torch's context parallelism passes keys and values around",
        "tensor": "which layers are divided is in the model's code",
        "etp": "the ranks along tp are among those that divide experts: etp=1",
    },
    _check,
    differ=_say_pairs_run_apart,
)  # fmt: skip
