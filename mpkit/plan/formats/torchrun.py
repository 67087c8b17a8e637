"""torchrun's options, and a SLURM batch script that starts torchrun: how many ranks there are, and where.

Neither says what the ranks do: read back, it is a plan of as many replicas.
"""

from __future__ import annotations

from mpkit.plan.formats.command import command, options
from mpkit.plan.formats.keys import Fields, Format, FormatKey, Values, context, number_of
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Page

__all__ = ["FLAGS", "LAUNCH", "SLURM", "TORCHRUN", "ranks_of"]

FLAGS = ("--standalone", "--no-python", "--run-path", "--module", "--virtual-local-rank")
NAMES = ("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--max-restarts")


def _several(asked: ExportRequest) -> bool:
    return asked.nodes > 1


LAUNCH: tuple[FormatKey, ...] = (
    context("--nnodes", "machines", lambda asked: asked.nodes),
    context("--nproc-per-node", "ranks per machine, one per GPU", lambda asked: asked.gpus_per_node),
    context("--rdzv-backend", "how machines find each other", lambda asked: "c10d" if _several(asked) else None),
    context("--rdzv-endpoint", "address of the first machine",
            lambda asked: f"{asked.master}:{asked.port}" if _several(asked) else None),
    context("--rdzv-id", "the name of this run, the same on all machines",
            lambda asked: asked.model if _several(asked) else None),
    context("--max-restarts", "how often all ranks are started again after a failure", lambda asked: 0),
    context("--standalone", "one machine, a free port", lambda asked: None if _several(asked) else True, (bool,)),
)  # fmt: skip


def ranks_of(values: Values, notes: list[str]) -> int:
    """Return the number of ranks that a launch line starts.

    Raises:
        ValueError: it is no number.
    """
    nodes = values.get("--nnodes", "1")
    if ":" in str(nodes):
        notes.append(f"--nnodes={nodes} is a range: read as the most")
        nodes = str(nodes).rpartition(":")[2]
    each = values.get("--nproc-per-node", "1")
    if str(each) in ("auto", "gpu", "cpu", "xpu"):
        raise ValueError(
            f"torchrun: --nproc-per-node={each} is as many as a machine has, which the file does not say: write the "
            "number, --nproc-per-node=8"
        )
    try:
        return number_of(nodes) * number_of(each)
    except ValueError as error:
        raise ValueError(
            f"torchrun: --nnodes={nodes!s:.60}, --nproc-per-node={each!s:.60}: {error}"
        ) from None


def _torchrun(page: Page) -> str:
    array = options(page, "LAUNCH", [*NAMES, "--standalone"])
    return f'{array}\ntorchrun "${{LAUNCH[@]}}" {page.asked.script}'


def _ranks_only(values: Values, fields: Fields, notes: list[str]) -> Fields:
    return fields | {"dp": ranks_of(values, notes)}


RANKS_ONLY = dict.fromkeys(
    (
        "pp", "dp", "tp", "cp", "schedule", "microbatches", "virtual_stages", "recompute", "cut", "data_parallel",
        "zero", "offload", "precision", "bucket_mb", "unused", "batchnorm", "prefetch", "cp_order",
        "cp_method", "ep", "sequence_parallel", "tensor",
    ),
    "it starts ranks; what they do is the script's",
)  # fmt: skip

TORCHRUN = Format(
    "torchrun", "torchrun's command line", command(_torchrun, FLAGS), LAUNCH, _ranks_only, RANKS_ONLY
)


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


def _slurm_ranks(values: Values, fields: Fields, notes: list[str]) -> Fields:
    nodes = values.get("--nodes", 1)
    each = values.get("--gpus-per-node", values.get("--gres", values.get("--ntasks-per-node", 1)))
    count = str(each).rpartition(":")[2]  # as in gpu:a100:8
    try:
        return fields | {"dp": number_of(str(nodes).rpartition("-")[2]) * number_of(count)}
    except ValueError as error:
        raise ValueError(f"slurm: --nodes={nodes!s:.60}, {each!r:.60} GPUs per node: {error}") from None


SLURM = Format(
    "slurm",
    "a SLURM batch script",
    command(_slurm),
    (
        context("--job-name", "what squeue shows", lambda asked: asked.model),
        context("--nodes", "machines", lambda asked: asked.nodes),
        context("--ntasks-per-node", "one torchrun per machine, which starts the ranks", lambda asked: 1),
        context("--gpus-per-node", "ranks per machine, one per GPU", lambda asked: asked.gpus_per_node),
        context("--gres", "the same, as older scripts say it", lambda asked: None),
        *(context(key.name, key.comment, lambda asked: None) for key in LAUNCH),
    ),
    _slurm_ranks,
    RANKS_ONLY,
)
