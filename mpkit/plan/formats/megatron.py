"""Megatron-LM's arguments, after torchrun's: all axes, 1F1B plain or interleaved, the distributed optimizer.

`--use-megatron-fsdp` shards gradients and parameters too. With it Megatron takes no pipeline here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from mpkit.plan.formats.command import command, options
from mpkit.plan.formats.deepspeed import BUCKET as DEEPSPEED_BUCKET
from mpkit.plan.formats.keys import (
    RANKS,
    Fields,
    Format,
    FormatKey,
    Values,
    context,
    flag,
    number,
    number_of,
    older_key,
)
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Page
from mpkit.plan.formats.torchrun import (
    FLAGS,
    LAUNCH,
    MACHINES,
    is_launched,
    ranks_of,
    refuse_files,
    slurm_ranks_of,
)
from mpkit.plan.formats.trainer import ZERO_STAGE
from mpkit.plan.rules import call_of
from mpkit.plan.schedule.catalogue import INTERLEAVED_1F1B, ONE_F_ONE_B, OVERLAPPED_1F1B

__all__ = ["ALL_AT_ONCE", "MEGATRON"]

GRADIENT_BYTES = 4  # Megatron reduces gradients in 32 bits
OVERLAP, BUCKET = "--overlap-grad-reduce", "--ddp-bucket-size"
ALL_AT_ONCE = 2**20
"""MiB of a bucket for all gradients: Megatron's without `--overlap-grad-reduce`, whatever size it is given."""
PAIRS = "--overlap-moe-expert-parallel-comm"
STRATEGIES = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}

LOOPED = INTERLEAVED_1F1B, OVERLAPPED_1F1B
COMM_TYPES = {"ring": "p2p", "ulysses": "a2a"}
BOTH = "a2a+p2p"
SIZES = "--hierarchical-context-parallel-sizes"


def _fsdp(asked: ExportRequest) -> bool:
    return asked.plan.zero > 1 and asked.plan.pp == 1


def _read_sharding(value: Any) -> dict[str, Any]:
    stages = {"no_shard": 0, **{name: stage for stage, name in STRATEGIES.items()}}
    if not isinstance(value, str) or value not in stages:
        raise ValueError(f"one of {', '.join(stages)}")
    return {"zero": stages[value]}


def _granularity(value: Any) -> dict[str, Any]:
    if value not in ("full", "selective"):
        raise ValueError("full or selective")
    return {"recompute": value}


def _bucket(elements: Any) -> dict[str, Any]:
    size = number_of(elements) * GRADIENT_BYTES / 2**20
    return {"bucket_mb": int(size) if size == int(size) else size}


def _bucket_left_out(values: Values, replicas: int) -> dict[str, Any]:
    """Return the buckets of Megatron's DistributedDataParallel where their size is left out."""
    if BUCKET in values or replicas == 1 or values.get("--DDP-impl") == "torch":
        return {}
    return _bucket(max(40_000_000, 1_000_000 * replicas)) if OVERLAP in values else {"bucket_mb": ALL_AT_ONCE}


def _count_stages(values: Values, each: int) -> int:
    """Return the stages per rank, of which all ranks' have `each` layers."""
    layers = values.get("--num-layers")
    if layers is None or number_of(layers) % each:
        raise ValueError(
            f"megatron: --num-layers-per-virtual-pipeline-stage needs --num-layers, a multiple of {each}"
            + ("" if layers is None else f", and it is {layers}")
            + "; or --num-virtual-stages-per-pipeline-rank=2"
        )
    return number_of(layers) // each


def _why_no_pairs(fields: Mapping[str, Any]) -> str:
    """Say why Megatron would refuse pairs in a plan of these fields (`TransformerConfig`); "" if it would not."""
    if fields.get("ep", 1) == 1:
        return "it goes with --expert-model-parallel-size=2 or more"
    if fields.get("pp", 1) > 1 and fields.get("virtual_stages", 1) == 1:
        return "in a pipeline it goes with several stages per rank, --num-virtual-stages-per-pipeline-rank=2"
    if fields.get("recompute") == "full":
        return "it goes with --recompute-granularity=selective, or none"
    if fields.get("precision", "full") == "full":
        return "it goes with --bf16 or --fp16"
    return ""


def _read_schedule(values: Values, fields: Fields, notes: list[str]) -> str:
    """Return the schedule of these arguments."""
    if PAIRS in values:
        if not (reason := _why_no_pairs(fields)):
            return OVERLAPPED_1F1B
        notes.append(f"Megatron refuses {PAIRS} here, since {reason}: left out")
    return INTERLEAVED_1F1B if fields.get("virtual_stages", 1) > 1 else ONE_F_ONE_B


def _count_ranks(values: Values, fields: Fields, inner: int, notes: list[str]) -> int:
    """Return the number of ranks; the fewest that work, if the text does not say how many there are."""
    if RANKS in values or is_launched(values):
        return ranks_of(values, notes)
    if any(key.name in values for key in MACHINES):
        return slurm_ranks_of(values, notes)
    apart = fields.get("cp", 1) * (fields.get("tp", 1) if fields.get("etp") == 1 else 1)
    ranks: int = inner * (fields.get("ep", 1) // gcd(fields.get("ep", 1), apart))
    if "--actor-num-gpus-per-node" in values:
        return number_of(values["--actor-num-gpus-per-node"]) * number_of(values.get("--actor-num-nodes", 1))
    notes.append(
        f"it does not say how many ranks there are: read as the fewest, {ranks}; Plan.read(..., ranks=8) says it"
    )
    return ranks


def _note_defaults(values: Values, notes: list[str]) -> None:
    """Note that the text is of a program with Megatron's arguments and defaults of its own."""
    for name, program in {"megatron sft": "ms-swift", "--actor-num-gpus-per-node": "slime"}.items():
        if name in values:
            notes.append(
                f"{program} has defaults of its own, such as the distributed optimizer and 16 bits: what the text "
                "leaves out is read as Megatron's"
            )


def _finish_deepspeed(values: Values, notes: list[str]) -> Fields:
    """Return what Megatron-DeepSpeed's options say, whose other settings are in a file.

    Raises:
        ValueError: the stage of ZeRO is in that file only.
    """
    if "--zero-stage" not in values:
        refuse_files(values, notes)
    bits = 2 if {"--bf16", "--fp16"} & values.keys() else GRADIENT_BYTES
    return {"bucket_mb": DEEPSPEED_BUCKET * bits / 2**20}


def _refuse_layout(value: Any) -> dict[str, Any]:
    raise ValueError(
        "a layout is not read: --num-virtual-stages-per-pipeline-rank=2 says the stages of each rank"
    )


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    inner = fields.get("pp", 1) * fields.get("tp", 1) * fields.get("cp", 1)
    if fields.get("ep", 1) > 1:
        fields.setdefault("etp", fields.get("tp", 1))
    _note_defaults(values, notes)
    ranks = _count_ranks(values, fields, inner, notes)
    if ranks % inner:
        raise ValueError(
            f"megatron: {ranks} ranks are no multiple of tensor x pipeline x context = {inner}: "
            f"--nproc-per-node={inner}"
        )
    dp = ranks // inner
    if layers := values.get("--num-layers-per-virtual-pipeline-stage"):
        fields["virtual_stages"] = _count_stages(values, fields.get("pp", 1) * number_of(layers))
    if "--recompute-activations" in values:
        fields["recompute"] = "selective"
    sharded = {"--use-megatron-fsdp", "--use-custom-fsdp"} & set(values)
    if "--use-torch-fsdp2" in values:
        fields["zero"] = 2 if "--torch-fsdp2-no-reshard-after-forward" in values else 3
    elif "--data-parallel-sharding-strategy" in values and not sharded:
        notes.append("--data-parallel-sharding-strategy goes with --use-megatron-fsdp: left out")
        fields["zero"] = 1 if "--use-distributed-optimizer" in values else 0
    if not sharded and "--use-torch-fsdp2" not in values:
        fields |= _bucket_left_out(values, dp * fields.get("cp", 1))
    fields |= {"dp": dp, "schedule": _read_schedule(values, fields, notes)}
    if fields.get("cp", 1) > 1 and fields.get("cp_method") != "ulysses":
        fields["cp_order"] = "zigzag"
    if "--global-batch-size" in values and "--micro-batch-size" in values:
        total, micro = number_of(values["--global-batch-size"]), number_of(values["--micro-batch-size"])
        if total % (micro * dp):
            raise ValueError(
                f"megatron: --global-batch-size={total} is no multiple of --micro-batch-size={micro} x {dp} replicas: "
                f"--global-batch-size={micro * dp * max(1, total // (micro * dp))}"
            )
        fields["microbatches"] = total // (micro * dp)
    if "--deepspeed" in values:
        fields |= _finish_deepspeed(values, notes)
    if "block" in (values.get(name) for name in METHODS) or any(
        str(values.get(name, 1)) != "1" for name in LAYERS
    ):
        notes.append("recomputation of some layers is read as of all")
    comm_type = values.get("--cp-comm-type", "p2p")
    if comm_type not in COMM_TYPES.values():
        notes.append(f"--cp-comm-type={comm_type} is read as p2p, a ring: a Plan has that, or a2a (Ulysses)")
    return fields


def _check(asked: ExportRequest) -> None:
    plan = asked.plan
    if plan.ep > 1 and plan.tp > 1 and not plan.sequence_parallel:
        raise ValueError(
            f"{call_of(plan)}: with experts and tensor parallelism, Megatron divides the sequence between layers too: "
            f"{call_of(plan, {'sequence_parallel': True, 'etp': 1})}"
        )
    if plan.schedule in LOOPED and plan.pp > 1 and plan.microbatches % plan.pp:
        more = plan.pp * (plan.microbatches // plan.pp + 1)
        raise ValueError(
            f"{call_of(plan)}: Megatron's interleaved schedule takes micro-batches in groups of pp={plan.pp}: "
            f"{call_of(plan, {'microbatches': more})}"
        )


def _script(page: Page) -> str:
    launch = [key.name for key in LAUNCH]
    rest = [name for name in page.values if name not in launch]
    return "\n".join(
        [
            options(page, "LAUNCH", launch),
            options(page, "ARGS", rest),
            '# The model, its data and its optimizer: arguments of your own after "${ARGS[@]}".',
            'torchrun "${LAUNCH[@]}" ' + page.asked.script + ' "${ARGS[@]}"',
        ]
    )


METHODS = ("--recompute-method", "--activations-checkpoint-method")
LAYERS = ("--recompute-num-layers", "--activations-checkpoint-num-layers", "--checkpoint-num-layers")
OTHER_FLAGS = (
    "--recompute-activations", "--use-custom-fsdp", "--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward",
)  # fmt: skip

KEYS: tuple[FormatKey, ...] = (
    number("--tensor-model-parallel-size", "tp", "ranks that share each layer"),
    number("--pipeline-model-parallel-size", "pp", "pipeline ranks"),
    number("--num-virtual-stages-per-pipeline-rank", "virtual_stages", "stages per rank: interleaved 1F1B",
           lambda asked: asked.plan.schedule in LOOPED and asked.plan.virtual_stages > 1 and asked.plan.pp > 1),
    context(PAIRS, "runs a forward and a backward in pairs; each computes while the other's tokens travel",
            lambda asked: True if asked.plan.schedule == OVERLAPPED_1F1B and not _why_no_pairs(vars(asked.plan))
            else None),
    number("--context-parallel-size", "cp", "ranks that share each sequence"),
    FormatKey("--cp-comm-type", "p2p: a ring; a2a: Ulysses",
        lambda asked: COMM_TYPES[asked.plan.cp_method] if asked.plan.cp > 1 else None,
        lambda value: {"cp_method": "ulysses"} if value == COMM_TYPES["ulysses"] else {}, ("cp_method",)),
    number("--expert-model-parallel-size", "ep", "ranks, out of the replicas, that divide each layer's experts",
           lambda asked: asked.plan.ep > 1),
    FormatKey("--expert-tensor-parallel-size", "ranks along tp that share each expert; 1: each has whole ones",
              lambda asked: asked.plan.etp or 1 if asked.plan.ep > 1 and asked.plan.tp > 1 else None,
              lambda value: {"etp": int(value)}, ("etp",)),
    flag("--sequence-parallel", "sequence_parallel", True, "divides the sequence between layers too"),
    context("--micro-batch-size", "samples per micro-batch and replica", lambda asked: asked.micro_batch, (int,)),
    context("--global-batch-size", "samples per optimizer step", lambda asked: asked.global_batch, (int,)),
    context("--seq-length", "tokens per sample", lambda asked: asked.sequence),
    FormatKey("--use-distributed-optimizer", "shards optimizer states among replicas (ZeRO-1)",
        lambda asked: True if asked.plan.zero else None, lambda value: {"zero": 1}, ("zero",)),
    number("--num-distributed-optimizer-instances", "dp_replicate", "groups of replicas, each of which shards them",
           lambda asked: asked.plan.zero == 1),
    context("--use-megatron-fsdp", "shards gradients and parameters too", lambda asked: True if _fsdp(asked) else None),
    FormatKey("--data-parallel-sharding-strategy", "2: gradients too; 3: parameters too",
        lambda asked: STRATEGIES[asked.plan.zero] if _fsdp(asked) else None, _read_sharding, ("zero",)),
    context(OVERLAP, "reduces a bucket as soon as it is full",
            lambda asked: None if asked.plan.bucket_mb == ALL_AT_ONCE else True),
    FormatKey(BUCKET, "elements of a bucket of gradients",
        lambda asked: None if asked.plan.bucket_mb == ALL_AT_ONCE else
        max(1, round(asked.plan.bucket_mb * 2**20 / GRADIENT_BYTES)), _bucket, ("bucket_mb",)),
    FormatKey("--recompute-granularity", "what is computed again in the backward: full, or attentions (selective)",
        lambda asked: asked.plan.recompute if asked.plan.recompute in ("full", "selective") else None,
        _granularity, ("recompute",)),
    context("--recompute-method", "all layers, one by one",
            lambda asked: "uniform" if asked.plan.recompute == "full" else None),
    context("--recompute-num-layers", "layers of which one input is kept",
            lambda asked: 1 if asked.plan.recompute == "full" else None),
    context("--num-layers", "layers of the model", lambda asked: None),
    context("--num-layers-per-virtual-pipeline-stage", "interleaved 1F1B, by its layers", lambda asked: None, (int,)),
    *(context(name, "as older versions say it", lambda asked: None) for name in OTHER_FLAGS),
    *(context(name, "as older versions say it", lambda asked: None) for name in (
        *LAYERS[1:], "--DDP-impl", "megatron sft", "--actor-num-gpus-per-node", "--actor-num-nodes",
    )),
    older_key("--model-parallel-size", ("tp",), lambda value: {"tp": number_of(value)}),
    older_key("--checkpoint-activations", ("recompute",), lambda value: {"recompute": "full"}),
    older_key("--activations-checkpoint-method", ("recompute",), lambda value: {"recompute": "full"}),
    ZERO_STAGE,
    *MACHINES,
    older_key("--pipeline-model-parallel-layout", (), _refuse_layout),
    flag("--bf16", "precision", "bf16", "computes in bf16, with fp32 master weights"),
    flag("--fp16", "precision", "fp16", "computes in fp16, with loss scaling"),
    FormatKey("--optimizer-cpu-offload", "the optimizer works on the host",
        lambda asked: True if asked.plan.offload == "optimizer" and asked.plan.zero else None,
        lambda value: {"offload": "optimizer"}, ("offload",)),
    context("--use-precision-aware-optimizer", "which offload needs",
            lambda asked: True if asked.plan.offload == "optimizer" and asked.plan.zero else None),
)  # fmt: skip

MEGATRON = Format(
    "megatron",
    "Megatron-LM's arguments",
    command(
        _script,
        (
            *FLAGS, "--sequence-parallel", "--use-distributed-optimizer", "--use-megatron-fsdp", "--bf16", "--fp16",
            "--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--checkpoint-activations", OVERLAP,
            PAIRS, *OTHER_FLAGS,
        ),
        (SIZES,),
    ),
    (*LAUNCH, *KEYS),
    _finish,
    {
        "schedule": "Megatron has 1F1B, plain or interleaved; and interleaved, or on one pipeline rank, in pairs "
        f"({PAIRS}), where ep is 2 or more, in 16 bits, without recompute='full'",
        "virtual_stages": "only the interleaved schedule has several stages per rank",
        "cut": "--pipeline-model-parallel-layout has a language of its own for the cut",
        "zero": "with a pipeline Megatron shards optimizer states only",
        "recompute": "recomputation of some layers is --recompute-method=block with the number of them per stage",
        "dp_shard": "--num-distributed-optimizer-instances goes with ZeRO-1",
        "dp_replicate": "--num-distributed-optimizer-instances goes with ZeRO-1",
        "offload": "the distributed optimizer is offloaded (zero=1 or more), parameters are not",
        "cp_order": "Megatron divides sequences in zigzag order",
        "etp": "it divides experts along tp (etp=tp), or counts its ranks among those that divide them (etp=1)",
        "prefetch": "how far ahead is its own choice",
        "bucket_mb": "--ddp-bucket-size is a whole number of elements",
        "tensor": "which layers are divided is in the model's code",
    },
    _check,
    frozenset(
        {"--bf16", "--fp16", "--seq-length", "--num-layers", "--global-batch-size", "--zero-stage"}
        | {key.name for key in (*LAUNCH, *MACHINES)}
    ),
)  # fmt: skip
