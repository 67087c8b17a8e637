"""What several keys say together for DeepSpeed, Accelerate, transformers, FSDP2 in Python and Megatron-LM."""

from __future__ import annotations

from pathlib import Path

from mpkit.plan.formats.launchers import count_ranks, launch_lines
from mpkit.plan.formats.python_code import assignments, python_code
from mpkit.plan.formats.script import command, options
from mpkit.plan.formats.syntax import JSON, YAML, Page
from mpkit.plan.formats.table import RANKS, Fields, FormatCode, Values, bool_of, number_of
from mpkit.plan.schedule.catalogue import INTERLEAVED_1F1B, ONE_F_ONE_B, OVERLAPPED_1F1B

__all__ = ["ACCELERATE", "DEEPSPEED", "FSDP", "MEGATRON", "TRAINER"]

MIB = 2**20
ALL_AT_ONCE = 2**20
"""MiB of a bucket for all gradients: Megatron's without `--overlap-grad-reduce`, whatever size it is given."""
DEEPSPEED_BUCKET = 500_000_000
"""Elements, where reduce_bucket_size is left out, and without ZeRO."""


def _bucket(elements: float, precision: str | None) -> Fields:
    """Return the MiB of a bucket with so many gradients, which 16 bits reduce in 16 bits."""
    size = elements * (4 if precision in (None, "full") else 2) / MIB
    return {"bucket_mb": int(size) if size == int(size) else size}


def _shards(format: str, dp: int, name: str, values: Values) -> int | None:
    """Return the replicas of each of the groups that a key counts; None if there is one."""
    groups = number_of(values.get(name, 1))
    if dp % groups:
        raise ValueError(f"{format}: {name}={groups} is no divisor of the {dp} replicas: {name}=1")
    return dp // groups if groups > 1 else None


# ---- DeepSpeed: pipelines and what is recomputed are in code there


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
    elements = values.get(
        "zero_optimization.reduce_bucket_size", DEEPSPEED_BUCKET if fields.get("dp", 1) > 1 else None
    )
    return fields | (_bucket(number_of(elements), fields.get("precision")) if elements else {})


DEEPSPEED = FormatCode(JSON, _finish_deepspeed)

# ---- Accelerate: one of DDP, FSDP2, DeepSpeed and Megatron-LM, by the plan


def _finish_accelerate(values: Values, fields: Fields, notes: list[str]) -> Fields:
    kind = values.get("distributed_type")
    ranks = values.get(RANKS) or number_of(values.get("num_processes", 1))
    if not {RANKS, "num_processes"} & values.keys() and kind not in (None, "NO", False):
        notes.append("num_processes is left out: read as 1; Plan.read(..., ranks=8) says how many there are")
    inner = fields.get("pp", 1) * fields.get("tp", 1) * fields.get("cp", 1)
    if ranks % inner:
        raise ValueError(
            f"accelerate: num_processes = {ranks} is no multiple of pp x tp x cp = {inner}: num_processes = {inner}"
        )
    fields["dp"] = ranks // inner
    sizes = (f"parallelism_config.parallelism_config_dp_{name}_size" for name in ("replicate", "shard"))
    replicate, shard = (number_of(values.get(name, 1)) for name in sizes)
    if replicate > 1 and shard > 1:
        fields["dp_shard"] = shard
    if not bool_of(values.get("fsdp_config.fsdp_reshard_after_forward", True)):
        fields["zero"] = 2
    if fields["dp"] * fields.get("cp", 1) > 1 and kind == "DEEPSPEED":
        fields |= _bucket(DEEPSPEED_BUCKET, fields.get("precision"))
    elif fields["dp"] * fields.get("cp", 1) > 1 and kind == "MEGATRON_LM":
        fields["bucket_mb"] = ALL_AT_ONCE
    return fields


ACCELERATE = FormatCode(YAML, _finish_accelerate)

# ---- transformers' TrainingArguments; the number of ranks is torchrun's


def _finish_trainer(values: Values, fields: Fields, notes: list[str]) -> Fields:
    if not values.get("fsdp") and any(name.startswith("fsdp_config.") for name in values):
        notes.append("fsdp_config goes with fsdp: left out")
    if fields.get("zero"):
        if not bool_of(values.get("fsdp_config.reshard_after_forward", True)):
            fields["zero"] = 2
        if bool_of(values.get("fsdp_config.cpu_offload", False)):
            fields["offload"] = "params"
    return fields | ({"dp": values[RANKS]} if RANKS in values else {})


TRAINER = FormatCode(YAML, _finish_trainer)

# ---- FSDP2 as Python: constants at the head of a module, and `shard` and `step`, which apply them


def _fsdp_module(page: Page) -> str:
    text = Path(__file__).with_name("fsdp.py.txt").read_text("utf-8").rstrip("\n")
    return text.replace("# the plan\n", f"{assignments(page, {})}\n")


def _finish_fsdp(values: Values, fields: Fields, notes: list[str]) -> Fields:
    fields["dp_shard"] = _shards("fsdp", fields.get("dp", 1), "REPLICATE", values)
    return fields | {"zero": 3 if values.get("RESHARD_AFTER_FORWARD", True) else 2}


FSDP = FormatCode(python_code(_fsdp_module, {}), _finish_fsdp)

# ---- Megatron-LM: all axes, 1F1B plain or interleaved, ZeRO-1, and without a pipeline its own FSDP

BUCKET = "--ddp-bucket-size"
LAYERS_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"


def _finish_megatron(values: Values, fields: Fields, notes: list[str]) -> Fields:
    tp, cp, ep = (fields.get(name, 1) for name in ("tp", "cp", "ep"))
    inner = fields.get("pp", 1) * tp * cp
    if ep > 1:
        fields.setdefault("etp", tp)
    ranks = count_ranks(values)
    if ranks is None:
        raise ValueError("megatron: it does not say how many ranks there are: Plan.read(..., ranks=8)")
    if ranks % inner:
        raise ValueError(
            f"megatron: {ranks} ranks are no multiple of tensor x pipeline x context = {inner}: "
            f"--nproc-per-node={inner}"
        )
    fields["dp"] = dp = ranks // inner
    if LAYERS_PER_STAGE in values:
        each = fields.get("pp", 1) * number_of(values[LAYERS_PER_STAGE])
        fields["virtual_stages"], rest = divmod(number_of(values.get("--num-layers", 1)), each)
        if rest:
            raise ValueError(
                f"megatron: {LAYERS_PER_STAGE}={values[LAYERS_PER_STAGE]} needs --num-layers, a multiple of {each}: a "
                "stage on each pipeline rank; or --num-virtual-stages-per-pipeline-rank=2"
            )
    fields["schedule"] = INTERLEAVED_1F1B if fields.get("virtual_stages", 1) > 1 else ONE_F_ONE_B
    if "--overlap-moe-expert-parallel-comm" in values:
        fields["schedule"] = OVERLAPPED_1F1B
    fields["dp_shard"] = _shards("megatron", dp, "--num-distributed-optimizer-instances", values)
    if cp > 1 and fields.get("cp_method") != "ulysses":
        fields["cp_order"] = "zigzag"
    if "--data-parallel-sharding-strategy" in values and "--use-megatron-fsdp" not in values:
        raise ValueError("megatron: --data-parallel-sharding-strategy goes with --use-megatron-fsdp")
    if BUCKET in values:
        fields |= _bucket(number_of(values[BUCKET]), None)
    elif "--use-megatron-fsdp" not in values and dp * cp > 1:  # DistributedDataParallel's own
        own = _bucket(max(40_000_000, 1_000_000 * dp * cp), None)
        fields |= own if "--overlap-grad-reduce" in values else {"bucket_mb": ALL_AT_ONCE}
    if "--global-batch-size" in values and "--micro-batch-size" in values:
        total, micro = number_of(values["--global-batch-size"]), number_of(values["--micro-batch-size"])
        if total % (micro * dp):
            raise ValueError(
                f"megatron: --global-batch-size={total} is no multiple of --micro-batch-size={micro} x {dp} replicas: "
                f"--global-batch-size={micro * dp * max(1, total // (micro * dp))}"
            )
        fields["microbatches"] = total // (micro * dp)
    return fields


def _megatron_script(page: Page) -> str:
    launch = launch_lines(page)
    rest = [name for name in page.values if f"  {name}" not in launch]
    return "\n".join(
        [
            launch,
            options(page, "ARGS", rest),
            '# The model, its data and its optimizer: arguments of your own after "${ARGS[@]}".',
            f'torchrun "${{LAUNCH[@]}}" {page.asked.script} "${{ARGS[@]}}"',
        ]
    )


MEGATRON = FormatCode(command("megatron", _megatron_script), _finish_megatron)
