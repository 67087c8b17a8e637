"""torchrun, SLURM and TF_CONFIG: how many ranks there are, and where.

None says what the ranks do: read back, it is a plan of as many replicas. TF_CONFIG is the environment variable of
TensorFlow's MultiWorkerMirroredStrategy, one worker per GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.script import command, options
from mpkit.plan.formats.syntax import JSON, Page
from mpkit.plan.formats.table import RANKS, Fields, FormatCode, Values, number_of

__all__ = ["SLURM", "TF_CONFIG", "TORCHRUN", "count_ranks", "launch_lines"]

NAMES = (
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--max-restarts", "--standalone",
)  # fmt: skip


def count_ranks(values: Values) -> int | None:
    """Return the number of ranks that a launch line, or else a batch script, starts; None if neither says it.

    A batch script's ranks are one per GPU, or one per task if it does not say GPUs.

    >>> count_ranks({"--nodes": "4", "--gres": "gpu:a100:8"}), count_ranks({"--num-processes": "8", "--nodes": "2"})
    (32, 8)

    Raises:
        ValueError: it is no number, or the plan is in another file.
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
    """Return the number of the first of these options that is there, such as 8 of gpu:a100:8."""
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


def launch_lines(page: Page) -> str:
    """Return the array of torchrun's options."""
    return options(page, "LAUNCH", NAMES)


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    return fields | {"dp": count_ranks(values) or 1}


def _torchrun(page: Page) -> str:
    return f'{launch_lines(page)}\ntorchrun "${{LAUNCH[@]}}" {page.asked.script}'


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


TORCHRUN = FormatCode(command("torchrun", _torchrun), _finish)
SLURM = FormatCode(command("slurm", _slurm), _finish)


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


TF_CONFIG = FormatCode(JSON, _finish_tf_config, _workers)
