"""What several keys say together in the files of DeepSpeed, Accelerate, FSDP2 in Python and transformers' Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpkit.plan.formats.keys import (
    LARGEST,
    RANKS,
    Fields,
    FormatCode,
    Values,
    bool_of,
    number_of,
    refuse_file,
)
from mpkit.plan.formats.python_code import assignments
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Page
from mpkit.plan.rules import call_of
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B

__all__ = [
    "ACCELERATE", "ALL_AT_ONCE", "DEEPSPEED", "DEEPSPEED_BUCKET", "FSDP", "TRAINER", "fsdp_words", "legacy_fsdp",
    "read_fsdp", "whole_or_real",
]  # fmt: skip

MIB = 2**20
ALL_AT_ONCE = 2**20
"""MiB of a bucket for all gradients: Megatron's without `--overlap-grad-reduce`, whatever size it is given."""
OFFLOADED_WITH_3 = "a Plan offloads parameters with ZeRO-3 only: read as zero=3"
OFFLOADED_WITHOUT_3 = "offload of parameters goes with ZeRO-3: left out"


def whole_or_real(size: float) -> float:
    """Return a number as an int, if it is whole."""
    return int(size) if size == int(size) else size


# ---- DeepSpeed: pipelines and what is recomputed are in code there

ZERO = "zero_optimization"
DEEPSPEED_BUCKET = 500_000_000
"""Elements, where reduce_bucket_size is left out, and without ZeRO."""


def _gradient_bytes(precision: str) -> int:
    return 4 if precision == "full" else 2


def _deepspeed_names(asked: ExportRequest) -> Mapping[str, Any]:
    """Return the elements of a bucket: bucket_mb is in bytes of gradients."""
    size = asked.plan.bucket_mb * MIB / _gradient_bytes(asked.plan.precision)
    return {"elements": max(1, round(size))}


def _read_elements(value: Any) -> Mapping[str, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise ValueError(f"a number of elements, above 0 and up to {LARGEST:,}, such as 5e8")
    return {}


def _finish_deepspeed(values: Values, fields: Fields, notes: list[str]) -> Fields:
    total, micro = values.get("train_batch_size"), values.get("train_micro_batch_size_per_gpu")
    steps = fields.get("microbatches", 1)
    if total is not None and micro is not None:
        dp, rest = divmod(number_of(total), number_of(micro) * steps)
        if rest or not dp:
            raise ValueError(
                f"deepspeed: train_batch_size = {total} is no multiple of train_micro_batch_size_per_gpu = {micro} x "
                f"gradient_accumulation_steps = {steps}. DeepSpeed asks for their product with the number of replicas, "
                f"such as train_batch_size = {number_of(micro) * steps * max(dp, 1)}"
            )
        fields["dp"] = dp
        if "gradient_accumulation_steps" not in values:
            notes.append(f"gradient_accumulation_steps is left out: read as 1, and {dp} replicas")
    elif RANKS in values:
        fields["dp"] = values[RANKS]
    else:
        notes.append(
            "the number of replicas is the quotient of train_batch_size and train_micro_batch_size_per_gpu, and one "
            "of them is left out: read as dp=1; Plan.read(..., ranks=8) says how many there are"
        )
    if fields.get("offload") == "params" and fields.get("zero", 0) < 3:
        is_offloaded = values.get(f"{ZERO}.offload_optimizer.device", "none") != "none" or bool_of(
            values.get(f"{ZERO}.cpu_offload", False)
        )
        fields["offload"] = "optimizer" if is_offloaded and fields.get("zero") else "none"
        notes.append(OFFLOADED_WITHOUT_3)
    if "nvme" in (values.get(f"{ZERO}.offload_{part}.device") for part in ("optimizer", "param")):
        notes.append("offload to nvme is read as offload to the host")
    elements = values.get(f"{ZERO}.reduce_bucket_size", DEEPSPEED_BUCKET if fields.get("dp", 1) > 1 else None)
    if elements:
        size = float(elements) * _gradient_bytes(fields.get("precision", "full")) / MIB
        fields["bucket_mb"] = whole_or_real(size)
    return fields


def _check_deepspeed(asked: ExportRequest) -> None:
    plan = asked.plan
    if plan.pp > 1 and plan.zero > 1:
        raise ValueError(
            f"{call_of(plan)}: DeepSpeed's pipeline engine works with ZeRO-0 and -1 only, since ZeRO-2 and -3 "
            f"reduce gradients during the backward of each micro-batch: {call_of(plan, {'zero': 1})}"
        )


DEEPSPEED = FormatCode(
    _finish_deepspeed,
    _check_deepspeed,
    names=_deepspeed_names,
    readers={
        "@elements": _read_elements,
        "@stage_1": lambda value: {"zero": 1} if value != {} and bool_of(value) else {},
    },
)


# ---- FSDP's older words

STRATEGIES = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2, "no_shard": 0}


def legacy_fsdp(words: str, notes: list[str]) -> dict[str, Any]:
    """Return the fields that FSDP's older words say, such as "full_shard auto_wrap".

    >>> legacy_fsdp("full_shard auto_wrap offload", [])
    {'zero': 3, 'offload': 'params'}

    Raises:
        ValueError: a word is none of them.
    """
    fields: dict[str, Any] = {}
    for word in words.lower().split():
        if word in STRATEGIES:
            fields["zero"] = STRATEGIES[word]
        elif word == "offload":
            fields["offload"] = "params"
        elif word != "auto_wrap":
            raise ValueError(f"{word!r} is none of {', '.join(STRATEGIES)}, auto_wrap, offload")
        if word.startswith("hybrid"):
            notes.append(
                f"{word} shards within a node, and the file does not say how many ranks a node has: read as sharding "
                "among all replicas; give Plan(dp_shard=8) for nodes of 8"
            )
    return fields


def fsdp_words(value: Any) -> str:
    """Return FSDP's older words, which may be a list, as one text; "" if the value is true, false or nothing."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value or "").strip("\"'")
    return "" if text.lower() in ("true", "false") else text


def read_fsdp(value: Any) -> Mapping[str, Any]:
    """Return what a Trainer's `fsdp` says: older words, or that it is on."""
    if words := fsdp_words(value):
        return legacy_fsdp(words, [])
    return {"zero": 3} if value and bool_of(value) else {}


def _resharding(value: Any, notes: list[str]) -> Fields:
    """Return what `reshard_after_forward` says: false is ZeRO-2; older files have a strategy there."""
    word = str(value).lower()
    return legacy_fsdp(word, notes) if word in STRATEGIES else {} if bool_of(word) else {"zero": 2}


# ---- Accelerate: one of DDP, FSDP2, DeepSpeed and Megatron-LM, by the plan

MODES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
OTHER_DEVICES = ("MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_HPU")
SHARDING = {
    "1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2",
}  # fmt: skip


def _accelerate_names(asked: ExportRequest) -> Mapping[str, Any]:
    """Return the distributed_type that says most of a plan, and whether its mesh has several axes."""
    plan = asked.plan
    if plan.pp > 1:
        mode = "MEGATRON_LM"
    elif plan.tp * plan.cp > 1:
        mode = "FSDP"
    elif plan.zero == 1 or (plan.zero and plan.offload == "optimizer"):
        mode = "DEEPSPEED"
    else:
        mode = "FSDP" if plan.zero else "MULTI_GPU" if plan.ranks > 1 else "NO"
    return {"mode": mode, "divided": plan.tp * plan.cp > 1 or plan.dp_shard is not None}


def _read_mode(value: Any) -> Mapping[str, Any]:
    value = "NO" if value is False else value  # YAML's NO without quotes
    if value not in (*MODES, *OTHER_DEVICES):
        raise ValueError(f"one of {', '.join(MODES)}")
    return {"zero": 3} if value == "FSDP" else {"schedule": ONE_F_ONE_B} if value == "MEGATRON_LM" else {}


def _finish_accelerate(values: Values, fields: Fields, notes: list[str]) -> Fields:
    kind = values.get("distributed_type")
    ranks = values.get(RANKS) or number_of(values.get("num_processes", 1))
    if not {RANKS, "num_processes"} & values.keys() and kind not in (None, "NO", False):
        notes.append("num_processes is left out: read as 1; Plan.read(..., ranks=8) says how many there are")
    if "mixed_precision" not in values and bool_of(values.get("fp16", False)):  # as it was said before 0.6
        fields["precision"] = "fp16"
    if kind == "DEEPSPEED" and "deepspeed_config.zero_stage" not in values:
        fields["zero"] = 2  # DeepSpeedPlugin's own
    inner = fields.get("pp", 1) * fields.get("tp", 1) * fields.get("cp", 1)
    if ranks % inner:
        raise ValueError(
            f"accelerate: num_processes = {ranks} is no multiple of pp x tp x cp = {inner}: num_processes = {inner}"
        )
    fields["dp"] = ranks // inner
    _finish_sharding(values, fields, notes)
    if fields["dp"] * fields.get("cp", 1) > 1 and kind in ("DEEPSPEED", "MEGATRON_LM"):
        bits = _gradient_bytes(fields.get("precision", "full"))
        fields["bucket_mb"] = DEEPSPEED_BUCKET * bits / MIB if kind == "DEEPSPEED" else ALL_AT_ONCE
    if fields.get("offload") == "params" and fields.get("zero") != 3:
        if kind == "DEEPSPEED":
            is_offloaded = values.get("deepspeed_config.offload_optimizer_device", "none") != "none"
            fields["offload"] = "optimizer" if is_offloaded and fields["zero"] else "none"
            notes.append(OFFLOADED_WITHOUT_3)
        else:
            fields["zero"] = 3
            notes.append(OFFLOADED_WITH_3)
    return fields


def _finish_sharding(values: Values, fields: Fields, notes: list[str]) -> None:
    """Add what FSDP's keys say together."""
    parallel = "parallelism_config.parallelism_config"
    replicate, shard = (
        number_of(values.get(f"{parallel}_{name}", 1)) for name in ("dp_replicate_size", "dp_shard_size")
    )
    if replicate > 1 and shard > 1:
        fields |= {"dp_shard": shard, "dp_replicate": replicate}
    strategy = values.get("fsdp_config.fsdp_sharding_strategy", values.get("fsdp_config.sharding_strategy"))
    if strategy is None:
        fields |= _resharding(values.get("fsdp_config.fsdp_reshard_after_forward", True), notes)
        return
    words, machines = SHARDING.get(str(strategy), str(strategy)), number_of(values.get("num_machines", 1))
    hybrid = words.lower().startswith("hybrid") and fields["dp"] % machines == 0
    fields |= legacy_fsdp(words, [] if hybrid else notes)
    fields |= {"dp_shard": fields["dp"] // machines} if hybrid else {}  # a group per machine


ACCELERATE = FormatCode(
    _finish_accelerate,
    names=_accelerate_names,
    readers={"@mode": _read_mode, "@refuse_file": refuse_file},
)


# ---- transformers' TrainingArguments; the number of ranks is torchrun's


def _finish_trainer(values: Values, fields: Fields, notes: list[str]) -> Fields:
    if not values.get("fsdp") and any(name.startswith("fsdp_config.") for name in values):
        if "fsdp_version" in values:  # Axolotl's FSDP2
            fields["zero"] = 3
        else:
            notes.append("fsdp_config goes with fsdp: left out")
    legacy_fsdp(fsdp_words(values.get("fsdp")), notes)
    if fields.get("zero"):  # keys of fsdp_config may begin with fsdp_, as Accelerate's do
        said = {
            name.removeprefix("fsdp_config.").removeprefix("fsdp_"): value for name, value in values.items()
        }
        if strategy := said.get("sharding_strategy"):
            fields |= legacy_fsdp(str(strategy), notes)
        fields |= _resharding(said.get("reshard_after_forward", True), notes)
        if any(bool_of(said.get(name, False)) for name in ("cpu_offload", "offload_params")):
            fields["offload"] = "params"
    if fields.get("offload") == "params" and fields.get("zero") != 3:
        notes.append(OFFLOADED_WITH_3)
        fields["zero"] = 3
    return fields | ({"dp": values[RANKS]} if RANKS in values else {})


TRAINER = FormatCode(_finish_trainer, readers={"@fsdp": read_fsdp, "@refuse_file": refuse_file})


# ---- FSDP2 as Python: constants at the head of a module, and `shard` and `step`, which apply them


def _fsdp_module(page: Page) -> str:
    imports, code = (
        Path(__file__).with_name("fsdp.py.txt").read_text("utf-8").rstrip("\n").split("# the plan\n")
    )
    return f"{imports}{assignments(page, {})}\n{code}"


def _finish_fsdp(values: Values, fields: Fields, notes: list[str]) -> Fields:
    return fields | {"zero": 3 if values.get("RESHARD_AFTER_FORWARD", True) else 2}


def _check_fsdp(asked: ExportRequest) -> None:
    if asked.plan.zero < 2:
        raise ValueError(
            f"{call_of(asked.plan)}: fully_shard shards gradients at least, and parameters too, so it is ZeRO-2 or "
            f"ZeRO-3: {call_of(asked.plan, {'zero': 3})}. ZeRO-{asked.plan.zero} is plan.to('deepspeed'), or "
            "torch's ZeroRedundancyOptimizer in a loop of your own"
        )


FSDP = FormatCode(_finish_fsdp, _check_fsdp, body=_fsdp_module)
