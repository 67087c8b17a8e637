"""torchrun's options, and a SLURM batch script that starts torchrun: how many ranks there are, and where.

Neither says what the ranks do: read back, it is a plan of as many replicas.
"""

from __future__ import annotations

from mpkit.plan.formats.command import command, options
from mpkit.plan.formats.keys import (
    RANKS,
    Fields,
    Format,
    FormatKey,
    Values,
    context,
    number_of,
    refuse_file,
)
from mpkit.plan.formats.request import ExportRequest
from mpkit.plan.formats.syntax import Page
from mpkit.plan.formats.trainer import ARGUMENTS, fsdp_words, legacy_fsdp
from mpkit.plan.formats.word import Word

__all__ = [
    "FLAGS",
    "LAUNCH",
    "MACHINES",
    "SLURM",
    "TORCHRUN",
    "is_launched",
    "ranks_of",
    "refuse_files",
    "slurm_ranks_of",
]

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
    *(context(name, "as DeepSpeed's and Accelerate's launchers say it", lambda asked: None) for name in (
        "--num-nodes", "--num-gpus", "--num-machines", "--num-processes",
    )),
    *(context(name, "the plan is in another file", lambda asked: None) for name in (
        "accelerate launch", "--config-file", "--deepspeed", "--deepspeed-config", "--deepspeed-config-file",
        "--use-fsdp", "--use-megatron-lm",
    )),
)  # fmt: skip


def is_launched(values: Values) -> bool:
    """Return whether an option of a launcher says how many ranks there are."""
    return any(name in values for name in ("--nproc-per-node", "--num-processes", "--num-gpus"))


def refuse_files(values: Values, notes: list[str]) -> None:
    """Check that no option names another file with the plan; note what FSDP's older words leave open.

    Raises:
        ValueError: one does.
    """
    for name in ("--deepspeed", "--deepspeed-config", "--deepspeed-config-file", "--config-file"):
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


def ranks_of(values: Values, notes: list[str]) -> int:
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
            raise ValueError(
                f"torchrun: --num-processes={values['--num-processes']!s:.60}: {error}"
            ) from None
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


def _torchrun(page: Page) -> str:
    array = options(page, "LAUNCH", [*NAMES, "--standalone"])
    return f'{array}\ntorchrun "${{LAUNCH[@]}}" {page.asked.script}'


def _finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    refuse_files(values, notes)
    return fields | {"dp": ranks_of(values, notes)}


COMMON = frozenset(
    {key.name for key in ARGUMENTS} | {"--config-file", "--deepspeed", "--num-gpus", "--num-nodes"}
)


RANKS_ONLY = dict.fromkeys(
    (
        "pp", "dp", "tp", "cp", "schedule", "microbatches", "virtual_stages", "recompute", "cut", "data_parallel",
        "zero", "offload", "precision", "bucket_mb", "unused", "batchnorm", "prefetch", "cp_order",
        "cp_method", "ep", "sequence_parallel", "tensor",
    ),
    "it starts ranks; what they do is the script's",
)  # fmt: skip

TORCHRUN = Format(
    "torchrun",
    "torchrun's command line",
    command(_torchrun, FLAGS),
    (*LAUNCH, *ARGUMENTS),
    _finish,
    RANKS_ONLY,
    common=COMMON - {"--num-gpus"},
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


def slurm_ranks_of(values: Values, notes: list[str]) -> int:
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


def _slurm_finish(values: Values, fields: Fields, notes: list[str]) -> Fields:
    refuse_files(values, notes)
    return fields | {"dp": slurm_ranks_of(values, notes)}


MACHINES: tuple[FormatKey, ...] = tuple(
    context(name, "as SLURM says it", lambda asked: None)
    for name in (
        "--nodes",
        "--ntasks",
        "--ntasks-per-node",
        "--gpus",
        "--gpus-per-node",
        "--gpus-per-task",
        "--gres",
    )
)


SLURM = Format(
    "slurm",
    "a SLURM batch script",
    command(_slurm),
    (
        context("--job-name", "what squeue shows", lambda asked: asked.model),
        context("--nodes", "machines", lambda asked: asked.nodes),
        context("--ntasks-per-node", "one torchrun per machine, which starts the ranks", lambda asked: 1),
        context("--gpus-per-node", "ranks per machine, one per GPU", lambda asked: asked.gpus_per_node),
        *(key for key in MACHINES if key.name in ("--gres", "--gpus", "--gpus-per-task", "--ntasks")),
        *(context(key.name, key.comment, lambda asked: None) for key in LAUNCH),
        *ARGUMENTS,
    ),
    _slurm_finish,
    RANKS_ONLY,
    common=COMMON | {key.name for key in LAUNCH} | {"--gpus", "--job-name"},
)
