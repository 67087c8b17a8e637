"""DeepSpeed's JSON (`deepspeed_config`): batches, ZeRO, offload, 16 bits, tensor and sequence parallelism.

Degrees of a pipeline are in code there (`PipelineModule(num_stages=)`), and so is what is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpkit.plan.formats.keys import (
    LARGEST,
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
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import JSON
from mpkit.plan.rules import call_of

__all__ = ["BUCKET", "DEEPSPEED"]

MIB = 2**20
ZERO = "zero_optimization"
BUCKET = 500_000_000  # elements, where reduce_bucket_size is left out, and without ZeRO


def _offload(name: str, part: str, values: tuple[str, ...]) -> FormatKey:
    """Return a key that is "cpu" for these values of `offload`."""

    def read(value: Any) -> dict[str, str]:
        if value not in ("cpu", "nvme", "none"):
            raise ValueError("one of none, cpu, nvme")
        return {} if value == "none" else {"offload": values[0]}

    def write(asked: ExportRequest) -> str | None:
        return "cpu" if asked.plan.offload in values and asked.plan.zero else None

    return FormatKey(name, f"where {part} are kept", write, read, ("offload",))


OLDER_OFFLOAD = {"cpu_offload": "optimizer", "cpu_offload_params": "params", "cpu_offload_param": "params"}


def _older_offload(ours: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {"offload": ours} if bool_of(value) else {}


def _bits(name: str, precision: str) -> FormatKey:
    return FormatKey(
        name, f"computes in {precision}, with fp32 master weights",
        lambda asked: True if asked.plan.precision == precision else None,
        lambda value: {"precision": precision} if bool_of(value) else {}, ("precision",),
    )  # fmt: skip


def _bucket(asked: ExportRequest) -> int:
    """Return the elements of a bucket: bucket_mb is in bytes of gradients."""
    return max(1, round(asked.plan.bucket_mb * MIB / _gradient_bytes(asked.plan.precision)))


def _gradient_bytes(precision: str) -> int:
    return 4 if precision == "full" else 2


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
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
        notes.append("offload of parameters goes with ZeRO-3: left out")
    if "nvme" in (values.get(f"{ZERO}.offload_{part}.device") for part in ("optimizer", "param")):
        notes.append("offload to nvme is read as offload to the host")
    elements = values.get(f"{ZERO}.reduce_bucket_size", BUCKET if fields.get("dp", 1) > 1 else None)
    if elements:
        size = float(elements) * _gradient_bytes(fields.get("precision", "full")) / MIB
        fields["bucket_mb"] = int(size) if size == int(size) else size
    return fields


def _check(asked: ExportRequest) -> None:
    plan = asked.plan
    if plan.pp > 1 and plan.zero > 1:
        raise ValueError(
            f"{call_of(plan)}: DeepSpeed's pipeline engine works with ZeRO-0 and -1 only, since ZeRO-2 and -3 "
            f"reduce gradients during the backward of each micro-batch: {call_of(plan, {'zero': 1})}"
        )


def _elements(value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
        raise ValueError(f"a number of elements, above 0 and up to {LARGEST:,}, such as 5e8")
    return {}


DEEPSPEED = Format(
    "deepspeed",
    "DeepSpeed's configuration",
    JSON,
    (
        context("train_batch_size", "samples per optimizer step: micro-batch x steps x replicas",
                lambda asked: asked.global_batch, (int,)),
        context("train_micro_batch_size_per_gpu", "samples per GPU and micro-batch",
                lambda asked: asked.micro_batch, (int,)),
        number("gradient_accumulation_steps", "microbatches", "micro-batches per optimizer step"),
        choice(f"{ZERO}.stage", "zero", {0: 0, 1: 1, 2: 2, 3: 3},
               "1 shards optimizer states, 2 gradients too, 3 parameters too"),
        FormatKey(f"{ZERO}.mics_shard_size", "replicas per group that shards everything (MiCS)",
                  lambda asked: asked.plan.dp_shard if asked.plan.zero == 3 else None,
                  lambda value: {} if value == -1 else {"dp_shard": number_of(value)}, ("dp_shard",)),
        FormatKey(f"{ZERO}.reduce_bucket_size", "elements of a bucket of gradients", _bucket, _elements,
                  ("bucket_mb",)),
        *(older_key(f"{ZERO}.{name}", ("offload",), _older_offload(ours)) for name, ours in OLDER_OFFLOAD.items()),
        _offload(f"{ZERO}.offload_optimizer.device", "optimizer states", ("optimizer", "params")),
        _offload(f"{ZERO}.offload_param.device", "parameters", ("params",)),
        _bits("bf16.enabled", "bf16"),
        _bits("fp16.enabled", "fp16"),
        FormatKey("tensor_parallel.autotp_size", "ranks that share each layer",
                  lambda asked: asked.plan.tp if asked.plan.tp > 1 else None,
                  lambda value: {} if value == 0 else {"tp": number_of(value)}, ("tp",)),
        FormatKey("sequence_parallel_size", "ranks that share each sequence, by heads (Ulysses)",
            lambda asked: asked.plan.cp if asked.plan.cp > 1 else None,
            lambda value: {} if number_of(value) == 1 else {"cp": number_of(value), "cp_method": "ulysses"},
            ("cp", "cp_method")),
        older_key(ZERO, ("zero",), lambda value: {"zero": 1} if value != {} and bool_of(value) else {}),
        older_key("bfloat16.enabled", ("precision",), lambda value: {"precision": "bf16"} if bool_of(value) else {}),
    ),
    _finish,
    {
        "pp": "stages are in code: PipelineModule(layers, num_stages=...)",
        "schedule": "the pipeline engine has one schedule, 1F1B, and says it in code",
        "virtual_stages": "the pipeline engine has one stage per rank",
        "cut": "the cut is in code: PipelineModule(layers, partition_method=...)",
        "recompute": "what is recomputed is in code: deepspeed.checkpointing.checkpoint, or the model's own",
        "offload": "DeepSpeed offloads what ZeRO shards: zero=1 or more",
        "prefetch": "stage3_prefetch_bucket_size counts elements, not layers",
        "bucket_mb": "reduce_bucket_size is a whole number of elements",
        "dp_shard": "MiCS has ZeRO-3 only",
        "dp_replicate": "MiCS has ZeRO-3 only",
        "sequence_parallel": "automatic tensor parallelism does not divide what is between layers",
        "ep": "experts are divided in code: deepspeed.moe.layer.MoE(..., ep_size=...)",
        "cp_method": "sequence_parallel_size is Ulysses, which has no ring",
        "cp_order": "Ulysses divides attention by heads, so sequences have no order to choose",
        "tensor": "which layers are divided: tensor_parallel.partition_config, by patterns of its own",
        "unused": "engines differ: parameters without a gradient are an option of the model's code",
        "data_parallel": "DeepSpeed has a process per GPU, as DDP does",
    },
    _check,
    common=frozenset({"gradient_accumulation_steps", "train_batch_size"}),
)  # fmt: skip
