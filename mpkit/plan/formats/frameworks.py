"""The formats by name, each with the code that its framework needs beside its table: what several keys say together.

torchrun, SLURM and TF_CONFIG say how many ranks there are and where, but not what they do: `Plan.read` makes a plan of
as many replicas. TF_CONFIG is the environment variable of TensorFlow's MultiWorkerMirroredStrategy, one worker per GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpkit.plan.formats.script import command, options
from mpkit.plan.formats.syntax import JSON, YAML, Page, assignments, python_code
from mpkit.plan.formats.table import RANKS, Fields, Format, Values, bool_of, number_of
from mpkit.plan.schedule import catalogue
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B, SCHEDULES, names_in_torch

if TYPE_CHECKING:
    from mpkit.plan.formats.write import ExportRequest

NAMES = (
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--max-restarts", "--standalone",
)  # fmt: skip


def count_ranks(values: Values) -> int | None:
    """Return the number of ranks that a launch line, or else a batch script, starts; None if neither says it.

    A batch script starts one rank per GPU, or one per task if it names no GPUs.

    >>> count_ranks({"--nodes": "4", "--gres": "gpu:a100:8"}), count_ranks({"--num-processes": "8", "--nodes": "2"})
    (32, 8)
    """
    if "accelerate launch" in values and "--config-file" in values:
        raise ValueError(
            "torchrun: accelerate launch reads the plan from its --config-file: Plan.read('accelerate.yaml')"
        )
    if RANKS in values:
        return int(values[RANKS])
    each = _first(values, "--nproc-per-node", "--num-gpus")
    if each is None:
        if total := _first(values, "--num-processes", "--gpus"):
            return total
        each = _first(values, "--gpus-per-node", "--gres", "--ntasks-per-node")
        if each is None and (tasks := _first(values, "--ntasks")):
            return tasks
    nodes = _first(values, "--nnodes", "--num-nodes", "--nodes")
    return None if each is None and nodes is None else (each or 1) * (nodes or 1)


def _first(values: Values, *names: str) -> int | None:
    """Return the number in the first of these options that has a value, such as 8 for gpu:a100:8."""
    name = next((name for name in names if name in values), None)
    if name is None:
        return None
    value = values[name]
    if isinstance(value, str) and name.startswith("--g"):
        value = value.partition("(")[0].rpartition(":")[2]
    try:
        return number_of(value)
    except ValueError as error:
        raise ValueError(f"torchrun: {name}={value!s:.60}: {error}, or Plan.read(..., ranks=8)") from None


def _finish_launch(values: Values, fields: Fields, notes: list[str]) -> Fields:
    return fields | {"dp": count_ranks(values) or 1}


def _torchrun(page: Page) -> str:
    return f'{options(page, "LAUNCH", NAMES)}\ntorchrun "${{LAUNCH[@]}}" {page.asked.script}'


def _slurm(page: Page) -> str:
    lines = [f"# {page.comments[name]}\n#SBATCH {name}={value}\n" for name, value in page.values.items()]
    return f"""{"".join(lines)}
set -eu
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)  # the first node
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" \\
    --rdzv-backend=c10d --rdzv-endpoint="$head:{page.asked.port}" --rdzv-id="$SLURM_JOB_ID" \\
    {page.asked.script}"""


TORCHRUN = Format("torchrun", command("torchrun", _torchrun), _finish_launch)
SLURM = Format("slurm", command("slurm", _slurm), _finish_launch)


def _workers(asked: ExportRequest) -> Mapping[str, Any]:
    """Return an address per rank: node numbers count up from the first node's, and each GPU has a port."""
    name = asked.master.rstrip("0123456789")
    first = int(asked.master[len(name) :] or 0)
    hosts = [asked.master] if asked.nodes == 1 else [f"{name}{first + node}" for node in range(asked.nodes)]
    return {"workers": [f"{host}:{asked.port + gpu}" for host in hosts for gpu in range(asked.gpus_per_node)]}


def _finish_tf_config(values: Values, fields: Fields, notes: list[str]) -> Fields:
    workers = [values.get(f"cluster.{job}", []) for job in ("worker", "chief")]
    if not all(isinstance(each, list) for each in workers):
        raise ValueError(
            f"tf_config: worker and chief are lists of addresses: {workers!r:.120}. Such as "
            '{"cluster": {"worker": ["node0:29500", "node1:29500"]}, "task": {"type": "worker", "index": 0}}'
        )
    return fields | {"dp": max(1, sum(map(len, workers)))}


TF_CONFIG = Format("tf_config", JSON, _finish_tf_config, _workers)


ALL_AT_ONCE = 2**20
"""MiB of a bucket for all gradients: Megatron's without `--overlap-grad-reduce`, whatever size it is given."""
DEEPSPEED_BUCKET = 500_000_000  # elements, if reduce_bucket_size is left out, and without ZeRO


def _bucket(elements: float, precision: str | None) -> Fields:
    """Return the MiB of a bucket with so many gradients, each of 4 bytes, or of 2 if the precision is of 16 bits."""
    size = elements * (4 if precision in (None, "full") else 2) / 2**20
    return {"bucket_mb": int(size) if size == int(size) else size}


def _shards(format: str, dp: int, name: str, values: Values) -> int | None:
    """Return the replicas in each of the groups that a key counts; None for a single group."""
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
    default = DEEPSPEED_BUCKET if fields.get("dp", 1) > 1 else None
    elements = values.get("zero_optimization.reduce_bucket_size", default)
    return fields | (_bucket(number_of(elements), fields.get("precision")) if elements else {})


DEEPSPEED = Format("deepspeed", JSON, _finish_deepspeed)

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
    if fields["dp"] * fields.get("cp", 1) > 1:
        deepspeed = _bucket(DEEPSPEED_BUCKET, fields.get("precision"))
        fields |= {"DEEPSPEED": deepspeed, "MEGATRON_LM": {"bucket_mb": ALL_AT_ONCE}}.get(str(kind), {})
    return fields


ACCELERATE = Format("accelerate", YAML, _finish_accelerate)

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


TRAINER = Format("trainer", YAML, _finish_trainer)

# ---- FSDP2 as Python: constants at the head of a module, and `shard` and `step`, which apply them


def _fsdp_module(page: Page) -> str:
    text = Path(__file__).with_name("fsdp.py.txt").read_text("utf-8").rstrip("\n")
    return text.replace("# the plan\n", f"{assignments(page, {})}\n")


def _finish_fsdp(values: Values, fields: Fields, notes: list[str]) -> Fields:
    fields["dp_shard"] = _shards("fsdp", fields.get("dp", 1), "REPLICATE", values)
    return fields | {"zero": 3 if values.get("RESHARD_AFTER_FORWARD", True) else 2}


FSDP = Format("fsdp", python_code(_fsdp_module, {}), _finish_fsdp)

# ---- Megatron-LM: all axes, 1F1B plain or interleaved, ZeRO-1, and without a pipeline its own FSDP

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
    fields["schedule"] = catalogue.INTERLEAVED_1F1B if fields.get("virtual_stages", 1) > 1 else ONE_F_ONE_B
    if "--overlap-moe-expert-parallel-comm" in values:
        fields["schedule"] = catalogue.OVERLAPPED_1F1B
    fields["dp_shard"] = _shards("megatron", dp, "--num-distributed-optimizer-instances", values)
    if cp > 1 and fields.get("cp_method") != "ulysses":
        fields["cp_order"] = "zigzag"
    if "--data-parallel-sharding-strategy" in values and "--use-megatron-fsdp" not in values:
        raise ValueError("megatron: --data-parallel-sharding-strategy goes with --use-megatron-fsdp")
    if "--ddp-bucket-size" in values:
        fields |= _bucket(number_of(values["--ddp-bucket-size"]), None)
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
    launch = options(page, "LAUNCH", NAMES)
    return f"""{launch}
{options(page, "ARGS", [name for name in page.values if f"  {name}" not in launch])}
# The model, its data and its optimizer: arguments of your own after "${{ARGS[@]}}".
torchrun "${{LAUNCH[@]}}" {page.asked.script} "${{ARGS[@]}}\""""


MEGATRON = Format("megatron", command("megatron", _megatron_script), _finish_megatron)


# ---- torchtitan (0.3, Python): all axes, torch's schedules, FSDP


CLASSES = {"parallelism": "ParallelismConfig", "training": "TrainingConfig"}
P, T = "parallelism", "training"


def _torchtitan_names(asked: ExportRequest) -> Mapping[str, Any]:
    plan, known = asked.plan, names_in_torch()
    if plan.pp == 1:
        return {"torch_schedule": None}
    entry = SCHEDULES[plan.schedule] if isinstance(plan.schedule, str) else None
    # torchtitan's looped schedules have 2 per rank.
    named = entry and (entry.per_rank or plan.virtual_stages > 1)
    return {"torch_schedule": known.get(str(plan.schedule) if named else "", known[ONE_F_ONE_B])}


def _finish_torchtitan(values: Values, fields: Fields, notes: list[str]) -> Fields:
    if (torchs := values.get(f"{P}.pipeline_parallel_schedule")) is not None:
        ours = {theirs.lower(): name for name, theirs in names_in_torch().items()}
        if (name := ours.get(str(torchs).lower())) is None:
            raise ValueError(
                f"torchtitan: pipeline_parallel_schedule = {torchs!r:.80}: one of "
                f"{', '.join(names_in_torch().values())}"
            )
        fields |= {"schedule": name} | ({} if SCHEDULES[name].per_rank else {"virtual_stages": 2})
    replicate = number_of(values.get(f"{P}.data_parallel_replicate_degree", 1))
    shard = _count_shards(values, fields, replicate, notes)
    if shard > 1 and replicate > 1:
        fields["dp_shard"] = shard
    pipelined, policy = fields.get("pp", 1) > 1, values.get(f"{P}.fsdp_reshard_after_forward", "default")
    if shard * fields.get("cp", 1) > 1 or fields.get("offload") == "params":  # ranks of cp are sharded too
        fields["zero"] = 2 if policy == "never" or (policy == "default" and pipelined) else 3
    fields["dp"] = shard * replicate
    fields.setdefault("precision", "bf16")  # torchtitan's defaults
    if pipelined:
        fields.setdefault("schedule", ONE_F_ONE_B)
    fields["sequence_parallel"] = fields.get("tp", 1) > 1 and fields.get("sequence_parallel", True)
    if fields.get("ep", 1) > 1 and fields["sequence_parallel"]:
        fields["etp"] = 1
    local = number_of(values.get(f"{T}.local_batch_size", 8))
    if fields.get("pp", 1) * fields.get("virtual_stages", 1) > 1:
        parts = local // number_of(values.get(f"{P}.pipeline_parallel_microbatch_size", 1))
    else:
        total = values.get(f"{T}.global_batch_size", -1)
        parts = 1 if total == -1 else number_of(total) // (local * fields["dp"])
    return fields | {"microbatches": max(1, parts)}


def _count_shards(values: Values, fields: Fields, replicate: int, notes: list[str]) -> int:
    """Return the replicas that shard; -1, the default, stands for all ranks that remain."""
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


def _torchtitan_code(page: Page) -> str:
    names = "from torchtitan.config import ParallelismConfig, TrainingConfig\n"
    if "activation_checkpoint" in page.values:
        names += "from torchtitan.distributed.activation_checkpoint import FullAC\n"
    return f"{names}\n{assignments(page, CLASSES)}"


TITAN_SYNTAX = python_code(_torchtitan_code, CLASSES)
TORCHTITAN = Format("torchtitan", TITAN_SYNTAX, _finish_torchtitan, _torchtitan_names)

FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (TORCHRUN, DEEPSPEED, ACCELERATE, FSDP, MEGATRON, TORCHTITAN, TRAINER, SLURM, TF_CONFIG)
}
"""The formats, by the name that `Plan.to` takes."""


def format_of(name: str) -> Format:
    """Return the format with this name."""
    if name not in FORMATS:
        near = get_close_matches(str(name).lower(), FORMATS, 1, 0.4) or ["deepspeed"]
        raise ValueError(
            f"There is no format {name!r}. There are {', '.join(map(repr, FORMATS))}. Did you mean "
            f"plan.to({near[0]!r})?"
        )
    return FORMATS[name]
