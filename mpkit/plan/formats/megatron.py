"""What Megatron-LM's arguments say together, after torchrun's: all axes, 1F1B plain or interleaved, ZeRO-1.

`--use-megatron-fsdp` shards gradients and parameters too. With it Megatron takes no pipeline here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from mpkit.plan.formats.frameworks import ALL_AT_ONCE, DEEPSPEED_BUCKET, whole_or_real
from mpkit.plan.formats.keys import RANKS, Fields, FormatCode, Values, number_of
from mpkit.plan.formats.launchers import count_launched, count_slurm, is_launched, launch_lines, refuse_files
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.script import options
from mpkit.plan.formats.syntax import Page, Word
from mpkit.plan.rules import call_of
from mpkit.plan.schedule.catalogue import INTERLEAVED_1F1B, ONE_F_ONE_B, OVERLAPPED_1F1B

__all__ = ["MEGATRON"]

GRADIENT_BYTES = 4  # Megatron reduces gradients in 32 bits
OVERLAP, BUCKET, PAIRS = "--overlap-grad-reduce", "--ddp-bucket-size", "--overlap-moe-expert-parallel-comm"
LOOPED = INTERLEAVED_1F1B, OVERLAPPED_1F1B
COMM_TYPES = {"ring": "p2p", "ulysses": "a2a"}
METHODS = ("--recompute-method", "--activations-checkpoint-method")
LAYERS = ("--recompute-num-layers", "--activations-checkpoint-num-layers", "--checkpoint-num-layers")
MACHINES = (
    "--nodes",
    "--ntasks",
    "--ntasks-per-node",
    "--gpus",
    "--gpus-per-node",
    "--gpus-per-task",
    "--gres",
)


def _names(asked: ExportRequest) -> Mapping[str, Any]:
    plan = asked.plan
    return {
        "looped": plan.schedule in LOOPED,
        "pairs": plan.schedule == OVERLAPPED_1F1B and not _why_no_pairs(vars(plan)),
        "at_once": plan.bucket_mb == ALL_AT_ONCE,
    }


def _read_bucket(elements: Any) -> Mapping[str, Any]:
    return {"bucket_mb": whole_or_real(number_of(elements) * GRADIENT_BYTES / 2**20)}


def _bucket_left_out(values: Values, replicas: int) -> Mapping[str, Any]:
    """Return the buckets of Megatron's DistributedDataParallel where their size is left out."""
    if BUCKET in values or replicas == 1 or values.get("--DDP-impl") == "torch":
        return {}
    if OVERLAP in values:
        return _read_bucket(max(40_000_000, 1_000_000 * replicas))
    return {"bucket_mb": ALL_AT_ONCE}


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
        return count_launched(values, notes)
    if any(name in values for name in MACHINES):
        return count_slurm(values, notes)
    if "--actor-num-gpus-per-node" in values:
        return number_of(values["--actor-num-gpus-per-node"]) * number_of(values.get("--actor-num-nodes", 1))
    apart = fields.get("cp", 1) * (fields.get("tp", 1) if fields.get("etp") == 1 else 1)
    ranks: int = inner * (fields.get("ep", 1) // gcd(fields.get("ep", 1), apart))
    notes.append(
        f"it does not say how many ranks there are: read as the fewest, {ranks}; Plan.read(..., ranks=8) says it"
    )
    return ranks


def _note_what_is_assumed(values: Values, notes: list[str]) -> None:
    for name, program in {"megatron sft": "ms-swift", "--actor-num-gpus-per-node": "slime"}.items():
        if name in values:
            notes.append(
                f"{program} has defaults of its own, such as the distributed optimizer and 16 bits: what the text "
                "leaves out is read as Megatron's"
            )
    if "block" in (values.get(name) for name in METHODS) or any(
        str(values.get(name, 1)) != "1" for name in LAYERS
    ):
        notes.append("recomputation of some layers is read as of all")
    comm_type = values.get("--cp-comm-type", "p2p")
    if comm_type not in COMM_TYPES.values():
        notes.append(f"--cp-comm-type={comm_type} is read as p2p, a ring: a Plan has that, or a2a (Ulysses)")


def _read_full(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Word) and value.reason:
        raise ValueError(value.reason)
    return {"recompute": "full"}


def _refuse_layout(value: Any) -> Mapping[str, Any]:
    raise ValueError(
        "a layout is not read: --num-virtual-stages-per-pipeline-rank=2 says the stages of each rank"
    )


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    inner = fields.get("pp", 1) * fields.get("tp", 1) * fields.get("cp", 1)
    if fields.get("ep", 1) > 1:
        fields.setdefault("etp", fields.get("tp", 1))
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
    _finish_sharding(values, fields, dp, notes)
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
    if "--deepspeed" in values:  # Megatron-DeepSpeed's options, whose other settings are in a file
        if "--zero-stage" not in values:
            refuse_files(values, notes)
        bits = 2 if {"--bf16", "--fp16"} & values.keys() else GRADIENT_BYTES
        fields["bucket_mb"] = DEEPSPEED_BUCKET * bits / 2**20
    _note_what_is_assumed(values, notes)
    return fields


def _finish_sharding(values: Values, fields: Fields, dp: int, notes: list[str]) -> None:
    """Add what Megatron's own FSDP, torch's and the distributed optimizer say together."""
    sharded = {"--use-megatron-fsdp", "--use-custom-fsdp"} & set(values)
    if "--use-torch-fsdp2" in values:
        fields["zero"] = 2 if "--torch-fsdp2-no-reshard-after-forward" in values else 3
    elif not sharded:
        if "--data-parallel-sharding-strategy" in values:
            notes.append("--data-parallel-sharding-strategy goes with --use-megatron-fsdp: left out")
            fields["zero"] = 1 if "--use-distributed-optimizer" in values else 0
        fields |= _bucket_left_out(values, dp * fields.get("cp", 1))


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
    launch = launch_lines(page)
    rest = [name for name in page.values if f"  {name}" not in launch]
    return "\n".join(
        [
            launch,
            options(page, "ARGS", rest),
            '# The model, its data and its optimizer: arguments of your own after "${ARGS[@]}".',
            'torchrun "${LAUNCH[@]}" ' + page.asked.script + ' "${ARGS[@]}"',
        ]
    )


MEGATRON = FormatCode(
    _finish,
    _check,
    names=_names,
    readers={
        "@bucket": _read_bucket,
        "@comm_type": lambda value: {"cp_method": "ulysses"} if value == COMM_TYPES["ulysses"] else {},
        "@full": _read_full,
        "@refuse_layout": _refuse_layout,
    },
    body=_script,
)
