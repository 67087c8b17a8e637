"""Detects a process that was started by a launcher with one process per rank (torchrun, srun, mpirun)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from mpkit.launch.process.joined import OWN

__all__ = ["refuse_second_launcher"]

LAUNCHERS = {
    "WORLD_SIZE": ("RANK", "torchrun"),
    "SLURM_STEP_NUM_TASKS": ("SLURM_PROCID", "srun"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "mpirun"),
    "PMI_SIZE": ("PMI_RANK", "mpiexec"),
}
"""By the variable with the number of processes: the variable with this process's number, and the launcher."""


def refuse_second_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Raise an error if this process is one of several copies of a program, each of which would start all ranks.

    >>> refuse_second_launcher({"RANK": "0", "WORLD_SIZE": "1"})  # one copy is one program
    >>> refuse_second_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})  # a batch script, which srun has not copied

    Args:
        environment: the environment variables.

    Raises:
        ValueError: this process is one of several.
    """
    if environment.get("TORCHELASTIC_RUN_ID", "").startswith(OWN):
        return  # a rank of a Cluster may make a Cluster of its own
    for size, (rank, launcher) in LAUNCHERS.items():
        count = environment.get(size, "")
        if rank in environment and count.isdecimal() and int(count) > 1:
            script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "train.py"
            raise ValueError(
                f"{rank}={environment[rank]} and {size}={count} are set, as {launcher} sets them: {count} copies of "
                "this program run, and each would start all ranks and train a model of its own. Start it once, with "
                f"`python {script}`: mk.Cluster(ranks={count}) starts every rank itself. (If they are left over from "
                f"something else: del os.environ[{rank!r}], os.environ[{size!r}])"
            )
