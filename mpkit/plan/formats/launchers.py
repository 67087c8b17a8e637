"""torchrun, SLURM and TF_CONFIG: how many ranks there are, and where.

None says what the ranks do: read back, it is a plan of as many replicas. TF_CONFIG is the environment variable of
TensorFlow's MultiWorkerMirroredStrategy, one worker per GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpkit.plan.formats.frameworks import fsdp_words, legacy_fsdp, read_fsdp
from mpkit.plan.formats.keys import RANKS, Fields, FormatCode, Values, number_of, refuse_file
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.script import options
from mpkit.plan.formats.syntax import Page, Word

__all__ = [
    "SLURM", "TF_CONFIG", "TORCHRUN", "count_launched", "count_slurm", "is_launched", "launch_lines", "refuse_files",
]  # fmt: skip

NAMES = (
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--max-restarts", "--standalone",
)  # fmt: skip
FILES = ("--deepspeed", "--deepspeed-config", "--deepspeed-config-file", "--config-file")


def is_launched(values: Values) -> bool:
    """Return whether an option of a launcher says how many ranks there are."""
    return any(name in values for name in ("--nproc-per-node", "--num-processes", "--num-gpus"))


def refuse_files(values: Values, notes: list[str]) -> None:
    """Check that no option names another file with the plan; note what FSDP's older words leave open.

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
    legacy_fsdp(fsdp_words(values.get("--fsdp")), notes)
    for name in ("--use-fsdp", "--use-megatron-lm"):
        if str(values.get(name, "false")).lower() != "false":
            raise ValueError(
                f"torchrun: {name} divides the model, as other options of accelerate launch say: mpkit reads the "
                "file that accelerate config writes, Plan.read('accelerate.yaml')"
            )


def count_launched(values: Values, notes: list[str]) -> int:
    """Return the number of ranks that a launch line starts.

    Raises:
        ValueError: it is no number.
    """
    if RANKS in values:
        return int(values[RANKS])
    if "--nproc-per-node" not in values and "--num-processes" in values:
        try:
            return number_of(values["--num-processes"])
        except ValueError as error:
            said = f"{values['--num-processes']!s:.60}"
            raise ValueError(f"torchrun: --num-processes={said}: {error}") from None
    nodes = values.get("--nnodes", values.get("--num-nodes", "1"))
    if ":" in str(nodes):
        notes.append(f"--nnodes={nodes} is a range: read as the most")
        nodes = str(nodes).rpartition(":")[2]
    each = values.get("--nproc-per-node", values.get("--num-gpus", "1"))
    if str(each) in ("auto", "gpu", "cpu", "xpu"):
        raise ValueError(
            f"torchrun: --nproc-per-node={each} is as many as a machine has, which the file does not say: "
            "--nproc-per-node=8 in the file, or Plan.read(..., ranks=8)"
        )
    try:
        return number_of(nodes) * number_of(each)
    except ValueError as error:
        raise ValueError(
            f"torchrun: --nnodes={nodes!s:.60}, --nproc-per-node={each!s:.60}: {error}, or Plan.read(..., ranks=8)"
        ) from None


def launch_lines(page: Page) -> str:
    """Return the array of torchrun's options."""
    return options(page, "LAUNCH", NAMES)


def _torchrun(page: Page) -> str:
    return f'{launch_lines(page)}\ntorchrun "${{LAUNCH[@]}}" {page.asked.script}'


def _finish_torchrun(values: Values, fields: Fields, notes: list[str]) -> Fields:
    refuse_files(values, notes)
    return fields | {"dp": count_launched(values, notes)}


TORCHRUN = FormatCode(_finish_torchrun, readers={"@fsdp": read_fsdp}, body=_torchrun)


# ---- SLURM


def _slurm(page: Page) -> str:
    lines = []
    for name, value in page.values.items():
        lines += [f"# {page.comments[name]}", f"#SBATCH {name}={value}"]
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


def count_slurm(values: Values, notes: list[str]) -> int:
    """Return the number of ranks of a batch script: one per GPU, or one per task, if it does not say GPUs.

    Raises:
        ValueError: it is no number.
    """
    if RANKS in values:
        return int(values[RANKS])
    tasks = values.get("--ntasks-per-node")
    gres = next((word for word in str(values.get("--gres", "")).split(",") if word.startswith("gpu")), None)
    each = values.get("--gpus-per-node", gres)
    if each is None and "--gpus-per-task" in values and tasks is not None:
        each = f"{number_of(str(values['--gpus-per-task']).rpartition(':')[2]) * number_of(tasks)}"
    launched = values.get("--nproc-per-node")
    if launched is not None and str(launched).isdecimal():
        each = launched  # torchrun's, out of as many GPUs or more
    total = values.get("--gpus") if each is None else None
    if total is None and each is None:
        notes.append("it does not say how many GPUs: read as one per task")
        each, total = tasks or 1, values.get("--ntasks")
    nodes = values.get("--nodes", values.get("--nnodes", 1))
    count = str(each if total is None else total).partition("(")[0].rpartition(":")[2]  # as in gpu:a100:8
    try:
        if total is not None:
            return number_of(count)
        if "--nodes" not in values and "--ntasks" in values and tasks is not None:
            nodes = -(-number_of(values["--ntasks"]) // number_of(tasks))
        return number_of(str(nodes).rpartition("-")[2]) * number_of("1" if count == "gpu" else count)
    except ValueError as error:
        open_word = next((w.reason for w in (nodes, each, total) if isinstance(w, Word) and w.reason), error)
        raise ValueError(f"slurm: --nodes={nodes!s:.60}, {each or total!s:.60} GPUs: {open_word}") from None


def _finish_slurm(values: Values, fields: Fields, notes: list[str]) -> Fields:
    refuse_files(values, notes)
    return fields | {"dp": count_slurm(values, notes)}


SLURM = FormatCode(_finish_slurm, readers={"@fsdp": read_fsdp}, body=_slurm)


# ---- TF_CONFIG


def _workers(asked: ExportRequest) -> Mapping[str, Any]:
    """Return an address per rank: the nodes count up from the first one, and each GPU has a port."""
    name = asked.master.rstrip("0123456789")
    first = int(asked.master[len(name) :] or 0)
    hosts = [asked.master] if asked.nodes == 1 else [f"{name}{first + node}" for node in range(asked.nodes)]
    return {"workers": [f"{host}:{asked.port + gpu}" for host in hosts for gpu in range(asked.gpus_per_node)]}


def _finish_tf_config(values: Values, fields: Fields, notes: list[str]) -> Fields:
    workers: Any = values.get("cluster.worker", [])
    chief: Any = values.get("cluster.chief", [])
    if not isinstance(workers, list) or not isinstance(chief, list) or len(chief) > 1:
        raise ValueError(
            f"tf_config: worker and chief are lists of addresses, chief one at most: {workers!r:.60}, {chief!r:.60}. "
            'Such as {"cluster": {"worker": ["node0:29500", "node1:29500"]}, "task": {"type": "worker", "index": 0}}'
        )
    return fields | {"dp": max(1, len(workers) + len(chief))}


def _check_tf_config(asked: ExportRequest) -> None:
    if asked.nodes > 1 and asked.master.replace(".", "").isdecimal():
        raise ValueError(
            f"plan.to('tf_config', master={asked.master!r}): the other nodes' names count up from the first one's, "
            "which an address does not: master='node0'"
        )


TF_CONFIG = FormatCode(_finish_tf_config, _check_tf_config, names=_workers)
