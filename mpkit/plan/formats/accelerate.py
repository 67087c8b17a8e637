"""Accelerate's YAML (`accelerate launch --config_file`): one of DDP, FSDP2, DeepSpeed and Megatron-LM, by the plan.

pipeline         MEGATRON_LM
ZeRO-1, or an optimizer that is offloaded by itself      DEEPSPEED
ZeRO-2 or -3, tensor or context parallelism              FSDP, with parallelism_config
replicas         MULTI_GPU
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpkit.plan.formats.deepspeed import BUCKET
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
    refuse_file,
)
from mpkit.plan.formats.megatron import ALL_AT_ONCE
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import YAML
from mpkit.plan.formats.trainer import OFFLOADED_WITH_3, STRATEGIES, legacy_fsdp
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B

__all__ = ["ACCELERATE"]

MODES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
OTHER_DEVICES = ("MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_HPU")
DEEPSPEED_BUCKET = BUCKET * 4 / 2**20
"""MiB of DeepSpeed's buckets in 32 bits, of which Accelerate's file says nothing."""
SHARDING = {
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
    "5": "hybrid_shard_zero2",
}


def mode(asked: ExportRequest) -> str:
    """Return the distributed_type that says most of a plan."""
    plan = asked.plan
    if plan.pp > 1:
        return "MEGATRON_LM"
    if plan.tp * plan.cp > 1:
        return "FSDP"
    if plan.zero == 1 or (plan.zero and plan.offload == "optimizer"):
        return "DEEPSPEED"
    return "FSDP" if plan.zero else "MULTI_GPU" if plan.ranks > 1 else "NO"


def _in_mode(name: str) -> Callable[[ExportRequest], bool]:
    return lambda asked: mode(asked) == name


def _write_for(name: str, write: Callable[[ExportRequest], Any]) -> Callable[[ExportRequest], Any]:
    """Return a writer that leaves its key out in other modes."""
    return lambda asked: write(asked) if mode(asked) == name else None


def _mode(value: Any) -> dict[str, Any]:
    value = "NO" if value is False else value  # YAML's NO without quotes
    if value not in (*MODES, *OTHER_DEVICES):
        raise ValueError(f"one of {', '.join(MODES)}")
    return {"zero": 3} if value == "FSDP" else {"schedule": ONE_F_ONE_B} if value == "MEGATRON_LM" else {}


def _true(field: str, ours: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {field: ours} if bool_of(value) else {}


def _device(ours: str) -> Callable[[Any], dict[str, Any]]:
    def read(value: Any) -> dict[str, Any]:
        if value not in ("none", "cpu", "nvme"):
            raise ValueError("one of none, cpu, nvme")
        return {} if value == "none" else {"offload": ours}

    return read


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    ranks = values.get(RANKS) or number_of(values.get("num_processes", 1))
    alone = values.get("distributed_type") in (None, "NO", False)
    if not {RANKS, "num_processes"} & values.keys() and not alone:
        notes.append("num_processes is left out: read as 1; Plan.read(..., ranks=8) says how many there are")
    if "mixed_precision" not in values and bool_of(values.get("fp16", False)):  # as it was said before 0.6
        fields["precision"] = "fp16"
    if values.get("distributed_type") == "DEEPSPEED" and f"{SPEED}.zero_stage" not in values:
        fields["zero"] = 2  # DeepSpeedPlugin's own
    inner = fields.get("pp", 1) * fields.get("tp", 1) * fields.get("cp", 1)
    if ranks % inner:
        raise ValueError(
            f"accelerate: num_processes = {ranks} is no multiple of pp x tp x cp = {inner}: num_processes = {inner}"
        )
    fields["dp"] = ranks // inner
    replicate, shard = (
        number_of(values.get(f"{PARALLEL}_{name}", 1)) for name in ("dp_replicate_size", "dp_shard_size")
    )
    if replicate > 1 and shard > 1:
        fields |= {"dp_shard": shard, "dp_replicate": replicate}
    strategy = values.get(f"{FSDP}_sharding_strategy", values.get("fsdp_config.sharding_strategy"))
    if strategy is not None:
        words, machines = SHARDING.get(str(strategy), str(strategy)), number_of(values.get("num_machines", 1))
        hybrid = words.lower().startswith("hybrid") and fields["dp"] % machines == 0
        fields |= legacy_fsdp(words, [] if hybrid else notes)
        fields |= {"dp_shard": fields["dp"] // machines} if hybrid else {}  # a group per machine
    elif (reshard := str(values.get(f"{FSDP}_reshard_after_forward", True)).lower()) in STRATEGIES:
        fields |= legacy_fsdp(reshard, notes)
    elif not bool_of(reshard):
        fields["zero"] = 2
    if fields["dp"] * fields.get("cp", 1) > 1:
        halved = 1 if fields.get("precision", "full") == "full" else 2
        buckets = {"DEEPSPEED": DEEPSPEED_BUCKET / halved, "MEGATRON_LM": ALL_AT_ONCE}
        fields |= {"bucket_mb": buckets[kind]} if (kind := values.get("distributed_type")) in buckets else {}
    if fields.get("offload") == "params" and fields.get("zero") != 3:
        _drop_offload(values, fields, notes)
    return fields


def _drop_offload(values: Values, fields: Fields, notes: list[str]) -> None:
    """Read an offload of parameters without ZeRO-3 as the framework does, or as the nearest plan."""
    if values.get("distributed_type") == "DEEPSPEED":
        is_offloaded = values.get(f"{SPEED}.offload_optimizer_device", "none") != "none"
        fields["offload"] = "optimizer" if is_offloaded and fields["zero"] else "none"
        notes.append("offload of parameters goes with ZeRO-3: left out")
    else:
        notes.append(OFFLOADED_WITH_3)
        fields["zero"] = 3


FSDP, PARALLEL = "fsdp_config.fsdp", "parallelism_config.parallelism_config"
SPEED, MEGA = "deepspeed_config", "megatron_lm_config.megatron_lm"


def _has_mesh(plan: Plan) -> bool:
    return plan.tp * plan.cp > 1 or plan.dp_shard is not None


def _parallel(name: str, comment: str, write: Callable[[ExportRequest], Any], field: str = "") -> FormatKey:
    """Return a key of parallelism_config, which is written where the mesh has several axes."""
    return FormatKey(
        f"{PARALLEL}_{name}", comment,
        lambda asked: write(asked) if mode(asked) == "FSDP" and _has_mesh(asked.plan) else None,
        lambda value: {field: number_of(value)} if field else {}, (field,) if field else (),
    )  # fmt: skip


GENERAL: tuple[FormatKey, ...] = (
    context("compute_environment", "these machines", lambda asked: "LOCAL_MACHINE"),
    FormatKey("distributed_type", "what divides the work", mode, _mode, ("zero",)),
    choice("mixed_precision", "precision", {"full": "no", "bf16": "bf16", "fp16": "fp16"}, "what it computes in"),
    context("num_machines", "machines", lambda asked: asked.nodes, (int,)),
    context("num_processes", "ranks on all machines, one per GPU", lambda asked: asked.plan.ranks, (int,)),
    context("machine_rank", "which machine this is: different on each, from 0", lambda asked: 0),
    context("main_process_ip", "the first machine", lambda asked: asked.master if asked.nodes > 1 else None),
    context("main_process_port", "its port", lambda asked: asked.port if asked.nodes > 1 else None, (int,)),
    context("fp16", "as was said before mixed_precision", lambda asked: None, (bool,)),
    context("use_cpu", "whether ranks are on CPUs", lambda asked: False, (bool,)),
)  # fmt: skip

SHARDED: tuple[FormatKey, ...] = (
    context(f"{FSDP}_version", "fully_shard", _write_for("FSDP", lambda asked: 2)),
    context(f"{FSDP}_reshard_after_forward", "true: ZeRO-3; false: gathered parameters stay until the backward",
            _write_for("FSDP", lambda asked: asked.plan.zero != 2)),
    context(f"{FSDP}_sharding_strategy", "as FSDP1 says it", lambda asked: None),
    older_key("fsdp_config.sharding_strategy", ("zero",), lambda value: {}),
    older_key("fsdp_config.offload_params", ("offload",), _true("offload", "params")),
    context(f"{FSDP}_auto_wrap_policy", "each block is gathered by itself",
            _write_for("FSDP", lambda asked: "TRANSFORMER_BASED_WRAP")),
    FormatKey(f"{FSDP}_offload_params", "parameters, gradients and optimizer on the host",
        _write_for("FSDP", lambda asked: asked.plan.offload == "params"), _true("offload", "params"), ("offload",)),
    FormatKey(f"{FSDP}_activation_checkpointing", "recomputes each block in the backward",
        _write_for("FSDP", lambda asked: asked.plan.recompute == "full"), _true("recompute", "full"), ("recompute",)),
    _parallel("dp_replicate_size", "groups that hold the same shards", lambda asked: asked.plan.mesh.dp_replicate),
    _parallel("dp_shard_size", "replicas, sharded", lambda asked: asked.plan.mesh.dp_shard),
    _parallel("tp_size", "ranks that share each layer", lambda asked: asked.plan.tp, "tp"),
    _parallel("cp_size", "ranks that share each sequence", lambda asked: asked.plan.cp, "cp"),
    FormatKey(f"{PARALLEL}_sp_size", "ranks that share each sequence, by heads (Ulysses)", lambda asked: None,
              lambda value: {"cp": number_of(value), "cp_method": "ulysses"} if number_of(value) > 1 else {}),
)  # fmt: skip

OTHERS: tuple[FormatKey, ...] = (
    choice(f"{SPEED}.zero_stage", "zero", {0: 0, 1: 1, 2: 2, 3: 3}, "1 shards optimizer states, 2 gradients too",
           when=_in_mode("DEEPSPEED")),
    number(f"{SPEED}.gradient_accumulation_steps", "microbatches", "micro-batches per optimizer step",
           _in_mode("DEEPSPEED")),
    FormatKey(f"{SPEED}.offload_optimizer_device", "where optimizer states are",
        _write_for("DEEPSPEED", lambda asked: "none" if asked.plan.offload == "none" else "cpu"), _device("optimizer"),
        ("offload",)),
    FormatKey(f"{SPEED}.offload_param_device", "where parameters are",
        _write_for("DEEPSPEED", lambda asked: "cpu" if asked.plan.offload == "params" else "none"), _device("params"),
        ("offload",)),
    FormatKey(f"{SPEED}.deepspeed_config_file", "DeepSpeed's own configuration", lambda asked: None, refuse_file),
    FormatKey(f"{MEGA}_recompute_activations", "recomputes attentions", lambda asked: None,
              _true("recompute", "selective"), ("recompute",)),
    number(f"{MEGA}_tp_degree", "tp", "ranks that share each layer", _in_mode("MEGATRON_LM")),
    number(f"{MEGA}_pp_degree", "pp", "pipeline ranks", _in_mode("MEGATRON_LM")),
    number(f"{MEGA}_context_parallel_size", "cp", "ranks that share each sequence", _in_mode("MEGATRON_LM")),
    number(f"{MEGA}_num_micro_batches", "microbatches", "micro-batches per optimizer step", _in_mode("MEGATRON_LM")),
    FormatKey(f"{MEGA}_sequence_parallelism", "divides the sequence between layers too",
        _write_for("MEGATRON_LM", lambda asked: asked.plan.sequence_parallel), _true("sequence_parallel", True),
        ("sequence_parallel",)),
    FormatKey(f"{MEGA}_use_distributed_optimizer", "shards optimizer states among replicas (ZeRO-1)",
        _write_for("MEGATRON_LM", lambda asked: asked.plan.zero > 0), _true("zero", 1), ("zero",)),
    context(f"{MEGA}_gradient_clipping", "largest norm of the gradients", _write_for("MEGATRON_LM", lambda asked: 1.0)),
)  # fmt: skip

ACCELERATE = Format(
    "accelerate",
    "Accelerate's configuration",
    YAML,
    (*GENERAL, *SHARDED, *OTHERS),
    _finish,
    {
        "schedule": "through Megatron-LM Accelerate runs 1F1B, and no other schedule",
        "virtual_stages": "one stage per rank",
        "cut": "Megatron-LM divides the layers evenly",
        "microbatches": "in code: Accelerator(gradient_accumulation_steps=...)",
        "zero": "of DDP with tensor or context parallelism it shards parameters (ZeRO-3 or -2), of a pipeline "
        "optimizer states only",
        "recompute": "all blocks or none, and with FSDP only",
        "offload": "with a pipeline everything stays on the GPU; FSDP offloads everything or nothing",
        "bucket_mb": "in code: DistributedDataParallelKwargs(bucket_cap_mb=...); through DeepSpeed they have 5e8 "
        "elements, and through Megatron-LM they are one",
        "unused": "in code: DistributedDataParallelKwargs(find_unused_parameters=True)",
        "sequence_parallel": "with Megatron-LM only",
        "cp_order": "the order is its own choice",
        "cp_method": "cp_size is a ring",
        "ep": "ParallelismConfig has no axis for experts",
    },
)
