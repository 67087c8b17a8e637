"""transformers' TrainingArguments, as YAML that HfArgumentParser reads: DDP or FSDP2, micro-batches, 16 bits.

The number of ranks is torchrun's.
"""

from __future__ import annotations

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
    flag,
    number,
    number_of,
    older_key,
    refuse_file,
)
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import YAML

__all__ = [
    "ARGUMENTS",
    "OFFLOADED_WITH_3",
    "STRATEGIES",
    "TRAINER",
    "ZERO_STAGE",
    "fsdp_words",
    "legacy_fsdp",
]

STRATEGIES = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2, "no_shard": 0}


OFFLOADED_WITH_3 = "a Plan offloads parameters with ZeRO-3 only: read as zero=3"


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


def _shards(asked: ExportRequest) -> bool:
    return asked.plan.zero > 1


def fsdp_words(value: Any) -> str:
    """Return FSDP's older words, which may be a list, as one text; "" if the value is true, false or nothing."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value or "").strip("\"'")
    return "" if text.lower() in ("true", "false") else text


def _fsdp(value: Any) -> dict[str, Any]:
    if words := fsdp_words(value):
        return legacy_fsdp(words, [])
    return {"zero": 3} if value and bool_of(value) else {}


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    if not values.get("fsdp") and any(name.startswith("fsdp_config.") for name in values):
        if "fsdp_version" in values:  # Axolotl's FSDP2
            fields["zero"] = 3
        else:
            notes.append("fsdp_config goes with fsdp: left out")
    legacy_fsdp(fsdp_words(values.get("fsdp")), notes)
    if fields.get("zero"):
        fields |= _settings(values, notes)
    if fields.get("offload") == "params" and fields.get("zero") != 3:
        notes.append(OFFLOADED_WITH_3)
        fields["zero"] = 3
    return fields | ({"dp": values[RANKS]} if RANKS in values else {})


def _settings(values: Values, notes: list[str]) -> Fields:
    """Return what fsdp_config says, whose keys may begin with fsdp_, as Accelerate's do."""
    said = {name.removeprefix("fsdp_config.").removeprefix("fsdp_"): value for name, value in values.items()}
    fields: Fields = {}
    if strategy := said.get("sharding_strategy"):
        fields |= legacy_fsdp(str(strategy), notes)
    reshard = str(said.get("reshard_after_forward", True)).lower()
    if reshard in STRATEGIES:
        fields |= legacy_fsdp(reshard, notes)
    elif not bool_of(reshard):
        fields["zero"] = 2
    if any(bool_of(said.get(name, False)) for name in ("cpu_offload", "offload_params")):
        fields["offload"] = "params"
    return fields


def _recompute(value: Any) -> dict[str, Any]:
    return {"recompute": "full"} if bool_of(value) else {}


TRAINER = Format(
    "trainer",
    "transformers' TrainingArguments",
    YAML,
    (
        context("per_device_train_batch_size", "samples per GPU and micro-batch", lambda asked: asked.micro_batch,
                (int,)),
        number("gradient_accumulation_steps", "microbatches", "micro-batches per optimizer step"),
        flag("bf16", "precision", "bf16", "computes in bf16", always=True),
        flag("fp16", "precision", "fp16", "computes in fp16, with loss scaling", always=True),
        FormatKey("activation_checkpointing", "recomputes each block in the backward",
            lambda asked: asked.plan.recompute == "full" and not _shards(asked), _recompute, ("recompute",)),
        FormatKey("gradient_checkpointing", "its older name", lambda asked: None, _recompute, ("recompute",)),
        FormatKey("deepspeed", "DeepSpeed's own configuration", lambda asked: None, refuse_file),
        FormatKey("fsdp", "shards parameters, gradients and optimizer states (FSDP2)",
            lambda asked: True if _shards(asked) else None, _fsdp, ("zero",)),
        context("fsdp_version", "Axolotl's", lambda asked: None),
        context("fsdp_config.version", "FSDP2: fully_shard", lambda asked: 2 if _shards(asked) else None),
        context("fsdp_config.reshard_after_forward", "true: ZeRO-3; false: gathered parameters stay until the backward",
                lambda asked: asked.plan.zero == 3 if _shards(asked) else None),
        context("fsdp_config.cpu_offload", "parameters, gradients and optimizer on the host",
                lambda asked: asked.plan.offload == "params" if _shards(asked) else None, (bool,)),
        FormatKey("fsdp_config.activation_checkpointing", "recomputes each block in the backward",
            lambda asked: asked.plan.recompute == "full" if _shards(asked) else None, _recompute, ("recompute",)),
        *(context(f"fsdp_config.{name}", "as older files and Accelerate's say it", lambda asked: None) for name in (
            "fsdp_version", "fsdp_reshard_after_forward", "fsdp_cpu_offload", "offload_params", "fsdp_offload_params",
            "sharding_strategy", "fsdp_sharding_strategy",
        )),
        older_key("fsdp_config.fsdp_activation_checkpointing", ("recompute",), _recompute),
        FormatKey("ddp_bucket_cap_mb", "MiB of gradients that DDP reduces at once",
            lambda asked: None if _shards(asked) else round(asked.plan.bucket_mb) or 1,
            lambda value: {"bucket_mb": number_of(value)}, ("bucket_mb",)),
        FormatKey("ddp_find_unused_parameters", "whether parameters may be without a gradient",
            lambda asked: None if _shards(asked) else asked.plan.unused == "allow",
            lambda value: {"unused": "allow"} if bool_of(value) else {}, ("unused",)),
    ),
    _finish,
    {
        "dp": "the number of ranks is torchrun's: plan.to('torchrun')",
        "zero": "FSDP shards parameters too; ZeRO-1 is DeepSpeed's: plan.to('deepspeed'), and deepspeed: its file",
        "pp": "the Trainer has no pipeline",
        "tp": "tensor parallelism is the model's: from_pretrained(tp_plan='auto')",
        "cp": "context parallelism is code: parallelism_config=ParallelismConfig(cp_size=...)",
        "offload": "FSDP offloads all states, with ZeRO-3; the optimizer alone is DeepSpeed's",
        "recompute": "activation_checkpointing is of all blocks or none",
        "bucket_mb": "ddp_bucket_cap_mb is a whole number, and of DDP only",
        "unused": "ddp_find_unused_parameters is of DDP only",
    },
    common=frozenset({"bf16", "fp16", "gradient_accumulation_steps"}),
)  # fmt: skip


# ---- as options of a script

ZERO_STAGE = choice("--zero-stage", "zero", {stage: stage for stage in range(4)}, "of DeepSpeed's examples",
                    when=lambda asked: False)  # fmt: skip

ARGUMENTS: tuple[FormatKey, ...] = (
    number("--gradient-accumulation-steps", "microbatches", "TrainingArguments of the script", lambda asked: False),
    context("--per-device-train-batch-size", "the same", lambda asked: None),
    choice("--mixed-precision", "precision", {"full": "no", "bf16": "bf16", "fp16": "fp16"}, "the same",
           when=lambda asked: False),
    *(FormatKey(f"--{name}", "the same", lambda asked: None, flag(name, "precision", name, "").read) for name in (
        "bf16", "fp16",
    )),
    FormatKey("--gradient-checkpointing", "the same", lambda asked: None,
              lambda value: {"recompute": "full"} if bool_of(value) else {}),
    FormatKey("--fsdp", "the same", lambda asked: None, _fsdp),
    ZERO_STAGE,
)  # fmt: skip
"""Options of scripts with a Trainer of transformers, and of others that have the same names."""
