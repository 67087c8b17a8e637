"""torchrun, SLURM and TF_CONFIG: how many ranks there are, and where.

None says what the ranks do: read back, it is a plan of as many replicas. TF_CONFIG is the environment variable of
TensorFlow's MultiWorkerMirroredStrategy, one worker per GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.script import options
from mpkit.plan.formats.syntax import Page, Word
from mpkit.plan.formats.table import RANKS, Fields, FormatCode, Values, number_of

__all__ = [
    "SLURM",
    "TF_CONFIG",
    "TORCHRUN",
    "count_ranks",
    "launch_lines",
    "read_fsdp",
    "refuse_file",
    "refuse_files",
]

NAMES = (
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--max-restarts", "--standalone",
)  # fmt: skip
FILES = ("--deepspeed", "--deepspeed-config", "--deepspeed-config-file", "--config-file")
STRATEGIES = {"full_shard": 3, "1": 3, "shard_grad_op": 2, "2": 2, "no_shard": 0, "3": 0}
"""The stages of ZeRO that FSDP's older words, and their numbers, stand for."""


def read_fsdp(value: Any) -> Mapping[str, Any]:
    """Return what `fsdp` says: that it is on, or older words, which may be a list.

    >>> read_fsdp("full_shard auto_wrap offload")
    {'zero': 3, 'offload': 'params'}

    Raises:
        ValueError: a word is none of them.
    """
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value).strip("\"'").lower()
    if text in ("true", "false", ""):
        return {"zero": 3} if text == "true" else {}
    fields: dict[str, Any] = {}
    for word in text.split():
        if word in STRATEGIES:
            fields["zero"] = STRATEGIES[word]
        elif word == "offload":
            fields["offload"] = "params"
        elif word.startswith("hybrid_shard"):
            raise ValueError(
                f"{word} shards within a node, and the file does not say its ranks: Plan(dp=16, zero=3, dp_shard=8)"
            )
        elif word != "auto_wrap":
            raise ValueError(f"{word!r} is none of full_shard, shard_grad_op, no_shard, auto_wrap, offload")
    return fields


def refuse_file(value: Any) -> Mapping[str, Any]:
    """Refuse the name of another file as a key's value.

    Raises:
        ValueError: always; it says how to read that file.
    """
    raise ValueError(
        "the plan is in that file: Plan.read('ds_config.json'), with a train_batch_size that says how many replicas"
    )


def refuse_files(values: Values) -> None:
    """Check that no option names another file, or another framework, with the plan.

    Raises:
        ValueError: one does.
    """
    for name in FILES:
        if name == "--config-file" and "accelerate launch" not in values:
            continue  # of the script's own, such as a model
        value = str(values.get(name, "true"))
        if value.lower() not in ("true", "false", "1", "0", "none", ""):
            try:
                refuse_file(value)
            except ValueError as error:
                raise ValueError(f"torchrun: {name} = {value!r:.80}: {error}") from None
    for name in ("--use-fsdp", "--use-megatron-lm"):
        if str(values.get(name, "false")).lower() != "false":
            raise ValueError(
                f"torchrun: {name} divides the model, as other options of accelerate launch say: mpkit reads the "
                "file that accelerate config writes, Plan.read('accelerate.yaml')"
            )


def count_ranks(values: Values) -> int | None:
    """Return the number of ranks that a launch line, or else a batch script, starts; None if neither says it.

    A batch script's ranks are one per GPU, or one per task if it does not say GPUs.

    Raises:
        ValueError: it is no number.
    """
    if RANKS in values:
        return int(values[RANKS])
    if "--nproc-per-node" not in values and "--num-processes" in values:
        return _number(values, "--num-processes")
    each: str | None = next((name for name in ("--nproc-per-node", "--num-gpus") if name in values), None)
    if each is not None and str(values[each]) in ("auto", "gpu", "cpu", "xpu"):
        raise ValueError(
            f"torchrun: {each}={values[each]} is as many as a machine has, which the file does not say: "
            f"{each}=8 in the file, or Plan.read(..., ranks=8)"
        )
    if "--gpus" in values and each is None:
        return _number(values, "--gpus")
    nodes = next((name for name in ("--nnodes", "--num-nodes", "--nodes") if name in values), "")
    if each is None and "--gpus-per-task" in values:
        tasks = _number(values, "--ntasks-per-node") * _number(values, nodes)
        return _number(values, "--gpus-per-task") * (
            _number(values, "--ntasks") if "--ntasks" in values else tasks
        )
    on_node = ("--gpus-per-node", "--gres", "--ntasks-per-node")
    each = each or next((name for name in on_node if name in values), None)
    if each is None and "--ntasks" in values:
        return _number(values, "--ntasks")
    return _number(values, nodes) * _number(values, each or "") if each or nodes else None


def _number(values: Values, name: str) -> int:
    """Return an option's number, such as 8 of gpu:a100:8; 1 if it is left out."""
    value = values.get(name, 1)
    if isinstance(value, str) and not (isinstance(value, Word) and value.reason) and name.startswith("--g"):
        value = value.partition("(")[0].rpartition(":")[2]
    try:
        return number_of(value)
    except ValueError as error:
        raise ValueError(f"torchrun: {name}={value!s:.60}, {error}, or Plan.read(..., ranks=8)") from None


def launch_lines(page: Page) -> str:
    """Return the array of torchrun's options."""
    return options(page, "LAUNCH", NAMES)


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    refuse_files(values)
    return fields | {"dp": count_ranks(values) or 1}


def _torchrun(page: Page) -> str:
    return f'{launch_lines(page)}\ntorchrun "${{LAUNCH[@]}}" {page.asked.script}'


TORCHRUN = FormatCode(_finish, readers={"@fsdp": read_fsdp}, body=_torchrun)


def _slurm(page: Page) -> str:
    lines = [f"# {page.comments[name]}\n#SBATCH {name}={value}" for name, value in page.values.items()]
    return "\n".join(
        [
            *lines,
            "",
            "set -eu",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)  # the first node',
            'srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" \\',
            f'    --rdzv-backend=c10d --rdzv-endpoint="$head:{page.asked.port}" --rdzv-id="$SLURM_JOB_ID" \\',
            f"    {page.asked.script}",
        ]
    )


SLURM = FormatCode(_finish, readers={"@fsdp": read_fsdp}, body=_slurm)


# ---- TF_CONFIG


def _workers(asked: ExportRequest) -> Mapping[str, Any]:
    """Return an address per rank: the nodes count up from the first one, and each GPU has a port."""
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


def _check_tf_config(asked: ExportRequest) -> None:
    if asked.nodes > 1 and asked.master.replace(".", "").isdecimal():
        raise ValueError(
            f"plan.to('tf_config', master={asked.master!r}): the other nodes' names count up from the first one's, "
            "which an address does not: master='node0'"
        )


TF_CONFIG = FormatCode(_finish_tf_config, _check_tf_config, names=_workers)
