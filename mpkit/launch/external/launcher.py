"""Detects a process that was started by a launcher with one process per rank (torchrun, srun, mpirun)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from mpkit.launch.external.environment import LAUNCHERS, within_cluster

__all__ = ["refuse_second_launcher"]


def refuse_second_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Raise an error if this process is one of several copies of a program, each of which would start all ranks.

    >>> refuse_second_launcher({"RANK": "0", "WORLD_SIZE": "1"})  # one copy is one program
    >>> refuse_second_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})  # a batch script, which srun has not copied

    Args:
        environment: the environment variables.

    Raises:
        ValueError: this process is one of several.
    """
    if within_cluster(environment):
        return  # a rank of a Cluster may make a Cluster of its own
    for known in LAUNCHERS:
        size, rank, launcher = known.size, known.rank, known.name
        count = environment.get(size, "")
        if rank in environment and count.isdecimal() and int(count) > 1:
            script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else "train.py"
            raise ValueError(
                f"{rank}={environment[rank]} and {size}={count} are set, as {launcher} sets them: {count} copies of "
                "this program run, and each would start all ranks and train a model of its own. To train on the ranks "
                f"that {launcher} has started, leave the number out: mk.Cluster(), or mk.Cluster.from_env(). "
                f"Or start it once, with `python {script}`, and mk.Cluster(ranks={count}) starts every rank "
                "itself. (If they are left over from something else: "
                f"del os.environ[{rank!r}], os.environ[{size!r}])"
            )
