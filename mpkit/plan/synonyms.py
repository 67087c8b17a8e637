"""What other libraries call the fields of a Plan, and their values."""

from __future__ import annotations

from typing import Any

__all__ = ["MEANT", "VALUES"]

_PARTS = (
    "microbatches= is what GPipe, torchgpipe and FairScale call chunks, and DeepSpeed, Accelerate and Lightning the "
    "steps of gradient accumulation: a batch is split into that many parts, which go through the model one after the "
    "other, and their gradients add up before the one optimizer step. (There the number multiplies the batch that the "
    "loader gives; here it divides the whole batch.)"
)
_PP = "pp= is the number of pipeline-parallel ranks, each with a stage of the model."
_DP = "dp= is the number of data-parallel replicas, each with a part of every batch."
_TP = "tp= is the number of tensor-parallel ranks, which share each layer."
_CP = (
    "cp= is the number of context-parallel ranks, which share each sequence; cp_method='ulysses' divides heads, "
    "cp_method='ring' passes keys around."
)
_ZERO = "zero= is the stage of ZeRO: 1 (ZeRO-1), 2 or 3 (what FSDP does)."
_RECOMPUTE = (
    'recompute="full" keeps the inputs of layers only and computes the rest again (activation checkpointing).'
)
_UNUSED = 'unused="allow" lets parameters be without a gradient.'
_PRECISION = 'precision="bf16" or "fp16" computes in 16 bits.'
_OFFLOAD = 'offload="optimizer" or "params" keeps these on the host.'
_GROUPS = (
    "dp_shard= is the number of replicas in each group within which ZeRO shards; dp_replicate= is the number of such "
    "groups."
)
_EP = "ep= is the number of ranks, out of the dp x cp replicas, that divide the experts of each layer."
_STAGES = "virtual_stages= is the number of stages per rank."

MEANT: dict[str, str] = {
    **dict.fromkeys(
        (
            "accumulate_grad_batches", "accumulation_steps", "chunks", "gradient_accumulation_steps",
            "grad_accumulation_steps", "gradient_accumulation", "micro_batches", "n_microbatches",
            "num_microbatches", "num_micro_batches",
        ),
        _PARTS,
    ),
    **dict.fromkeys(("pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size", "num_stages", "stages"), _PP),
    **dict.fromkeys(("data_parallel_size", "dp_size", "num_replicas"), _DP),
    **dict.fromkeys(("tensor_parallel_size", "tensor_model_parallel_size", "tp_size"), _TP),
    **dict.fromkeys(
        ("context_parallel_size", "cp_size", "sequence_parallel_size", "sp_size", "ulysses", "ulysses_size"), _CP
    ),
    **dict.fromkeys(("zero_stage", "fsdp", "sharding_strategy"), _ZERO),
    **dict.fromkeys(
        ("activation_checkpointing", "gradient_checkpointing", "checkpoint", "checkpointing", "remat"), _RECOMPUTE
    ),
    **dict.fromkeys(("find_unused_parameters", "allow_unused"), _UNUSED),
    **dict.fromkeys(("mixed_precision", "dtype", "amp", "autocast", "bf16", "fp16", "opt_level"), _PRECISION),
    **dict.fromkeys(("cpu_offload", "offload_optimizer", "offload_param"), _OFFLOAD),
    **dict.fromkeys(("num_model_chunks", "virtual_pipeline_model_parallel_size", "interleave"), _STAGES),
    **dict.fromkeys(
        (
            "data_parallel_shard_degree", "data_parallel_replicate_degree", "dp_shard_size", "dp_replicate_size",
            "hybrid_shard", "hsdp", "mics_shard_size", "num_distributed_optimizer_instances",
        ),
        _GROUPS,
    ),
    **dict.fromkeys(
        (
            "expert_parallel", "expert_parallel_size", "expert_parallel_degree", "expert_model_parallel_size",
            "ep_size", "moe_ep_size", "num_experts", "experts",
        ),
        _EP,
    ),
    "bucket_cap_mb": "bucket_mb= is the size of a bucket of gradients in MiB.",
    "sync_batchnorm": 'batchnorm="sync" takes statistics over the whole batch, batchnorm="local" over a rank\'s own.',
}  # fmt: skip
"""For another library's keyword, the field of a Plan."""

_AUTOCAST = (
    "Apex's O1 and torch.autocast choose the precision of each operator; a Plan computes in 16 bits throughout, with "
    "fp32 master weights (Apex's O2)."
)
_ALL_16 = "Apex's O3 has no master weights in 32 bits, without which small updates are lost; a Plan always has them."
_HSDP = (
    "hybrid_shard shards within groups of replicas, such as those of a node: zero=3 with dp_shard= replicas per group, "
    "such as Plan(dp=16, zero=3, dp_shard=8)."
)


VALUES: dict[str, dict[str, tuple[Any, str]]] = {
    "precision": {
        **dict.fromkeys(
            ("fp32", "float32", "float", "32", "32-true", "no", "none", "o0"),
            ("full", "The model's own dtype, which is mostly fp32, is precision='full'."),
        ),
        **dict.fromkeys(("bfloat16", "bf16-mixed", "torch.bfloat16"), ("bf16", "")),
        **dict.fromkeys(("float16", "half", "16", "16-mixed", "torch.float16"), ("fp16", "")),
        "o2": ("fp16", "Apex's O2 is precision='fp16': 16 bits, with fp32 master weights and loss scaling."),
        **dict.fromkeys(("o1", "autocast", "amp", "mixed"), ("bf16", _AUTOCAST)),
        "o3": ("fp16", _ALL_16),
    },
    "zero": {
        **dict.fromkeys(("full_shard", "fsdp", "stage3"), (3, "FSDP's full_shard is ZeRO-3.")),
        **dict.fromkeys(
            ("shard_grad_op", "stage2"), (2, "FSDP's shard_grad_op shards gradients and optimizer states: ZeRO-2.")
        ),
        **dict.fromkeys(("no_shard", "none"), (0, "FSDP's no_shard is DDP.")),
        **dict.fromkeys(("hybrid_shard", "_hybrid_shard_zero2", "hsdp"), (3, _HSDP)),
    },
    "data_parallel": {
        **dict.fromkeys(("ddp", "distributed_data_parallel"), ("ddp", "")),
        **dict.fromkeys(("dataparallel", "data_parallel"), ("dp", "nn.DataParallel is data_parallel='dp'.")),
    },
}  # fmt: skip
"""By field, for another library's value in lower case: the closest value of a Plan, and what to know of it."""
