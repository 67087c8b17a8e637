"""Which rank this process is, from the variables of the launcher that started it (torchrun, srun, mpirun)."""

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mpkit.common.launch_folder import OWN


class LauncherVariables(NamedTuple):
    """The variables with which a launcher, named by its command, describes a process; "" where there is none."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    node: str = ""


OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
LAUNCHERS = (
    LauncherVariables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    LauncherVariables("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", node="SLURM_NODEID"),
    LauncherVariables("mpirun", *OPEN_MPI),
    LauncherVariables("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

PORT = 29500  # of the rendezvous where the environment names none; torchrun's default too


@dataclass(frozen=True)
class LauncherPlace:
    """This process among those that the launcher started."""

    launcher: str  # its command
    rank: int
    world_size: int
    local_rank: int  # its number on its node
    node: str  # the launcher's number of the node, or else the host's name
    host: str
    address: str  # where rank 0 can be reached, at `port`
    port: int
    attempt: int = 0  # how often torchrun has restarted the processes


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher has started this process as one of several, or torchrun as the only one.

    >>> is_launched({"RANK": "0", "WORLD_SIZE": "4"}), is_launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    (True, False)
    """
    if within_cluster(environment):
        return False
    for launcher in LAUNCHERS:
        if launcher.rank in environment and environment.get(launcher.size, "").isdecimal():
            return launcher.name == "torchrun" or int(environment[launcher.size]) > 1
    return False


def within_cluster(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a rank of a Cluster, which looks to programs like one of torchrun's."""
    return environment.get("TORCHELASTIC_RUN_ID", "").startswith(OWN)


def place_here(environment: Mapping[str, str] = os.environ) -> LauncherPlace:
    """Return this process's place.

    >>> place = place_here({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    ...                     "SLURM_STEP_NODELIST": "n[03-05]"})
    >>> place.rank, place.world_size, place.local_rank, place.node, place.address
    (5, 8, 1, '1', 'n03')
    """
    if within_cluster(environment):
        raise ValueError(
            "mk.Cluster.from_env() is called on a rank of a cluster, within cluster.run(fn): this function is running "
            "on all ranks already; ctx.rank, ctx.world_size and ctx.comm are this rank's"
        )
    launcher = next((each for each in LAUNCHERS if each.rank in environment), None)
    if launcher is None:
        raise ValueError(
            "mk.Cluster.from_env() reads which rank this process is from the launcher's variables, and none is set: "
            "RANK and WORLD_SIZE (torchrun), SLURM_PROCID (srun), OMPI_COMM_WORLD_RANK (mpirun). Start the script with "
            "`torchrun --standalone --nproc-per-node 4 train.py`; or without a launcher: mk.Cluster(ranks=4) starts "
            "the ranks itself, with `python train.py`"
        )
    rank, size = _number(environment, launcher.rank), _number(environment, launcher.size)
    local_rank = _number(environment, launcher.local_rank, rank)
    if not rank < size:
        raise ValueError(
            f"{launcher.rank}={rank} and {launcher.size}={size}: ranks are numbered from 0 to {launcher.size} - 1, so "
            f"there is no rank {rank}; {launcher.name} sets both"
        )
    host = socket.gethostname()
    alone = size == _number(environment, launcher.local_size, size if size == 1 else 0)
    return LauncherPlace(
        launcher.name, rank, size, local_rank, environment.get(launcher.node) or host, host,
        _address(environment, launcher, alone), _number(environment, "MASTER_PORT", PORT),
        _number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
    )  # fmt: skip


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    >>> first_host("gpu[007-009,12],cpu1"), first_host("a1,a2")
    ('gpu007', 'a1')
    """
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    return "" if match is None else match[1] + (match[2] or "")


def _address(environment: Mapping[str, str], launcher: LauncherVariables, alone: bool) -> str:
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    if launcher.name == "srun" and nodes:
        return first_host(nodes)
    if alone:
        return "127.0.0.1"
    passes = " (mpirun passes them on with -x MASTER_ADDR -x MASTER_PORT)" * (launcher.name == "mpirun")
    raise ValueError(
        f"{launcher.rank} is set, as {launcher.name} sets it, and MASTER_ADDR is not: the processes do not know where "
        "rank 0 is. Before the launcher's command: export MASTER_ADDR=<name or address of the first node> "
        f"MASTER_PORT={PORT}{passes}"
    )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "") if name else ""
    if text.isdecimal():
        return int(text)
    if not text and default is not None:
        return default
    raise ValueError(
        f"{name}={text!r}: a whole number is wanted here, which the launcher sets; set by hand, both are needed: "
        "RANK=0 WORLD_SIZE=2"
        if text
        else f"the launcher's variable {name} is not set, and others of the same launcher are: are they left over "
        "from something else? torchrun sets RANK, WORLD_SIZE and LOCAL_RANK together"
    )


def refuse_second_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Raise an error if this process is one of several copies of a program, each of which would start all ranks.

    >>> refuse_second_launcher({"RANK": "0", "WORLD_SIZE": "1"})  # one copy is one program
    >>> refuse_second_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})  # a batch script, which srun has not copied
    """
    if within_cluster(environment):
        return  # a rank of a Cluster may make a Cluster of its own
    for launcher, rank, size, *_ in LAUNCHERS:
        count = environment.get(size, "")
        if rank in environment and count.isdecimal() and int(count) > 1:
            script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "train.py"
            raise ValueError(
                f"{rank}={environment[rank]} and {size}={count} are set, as {launcher} sets them: {count} copies of "
                "this program run, and each would start all ranks and train a model of its own. To train on the ranks "
                f"that {launcher} has started, leave the number out: mk.Cluster(), or mk.Cluster.from_env(). Or start "
                f"it once, with `python {script}`, and mk.Cluster(ranks={count}) starts every rank itself. (If they "
                f"are left over from something else: del os.environ[{rank!r}], os.environ[{size!r}])"
            )
