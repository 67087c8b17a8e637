"""`mpkit watch train.py`: an unchanged program, as torchrun would start it, on the timeline."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpkit.launch.place import is_launched, within_cluster
from mpkit.launch.session.cluster import Cluster

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


@dataclass(frozen=True)
class CommandProgram:
    """A program as it is named on a command line.

    Attributes:
        name: the path of a script, or the name of a module.
        arguments: its own arguments.
        is_module: whether it is a module, as after `python -m`.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Check that the program exists.

        Raises:
            ValueError: there is no such file.
        """
        if not self.is_module and not Path(self.name).is_file():
            raise ValueError(
                f"{self.name}: no such file; mpkit watch takes a script and its arguments: "
                "mpkit watch --ranks 4 train.py --lr 0.1"
            )

    def run(self, ctx: Context) -> None:
        """Run the program in this process as its main module.

        Args:
            ctx: the rank's context, which the program knows nothing of.
        """
        sys.argv[:] = [self.name, *self.arguments]
        sys.path.insert(0, os.getcwd() if self.is_module else str(Path(self.name).resolve().parent))
        try:
            if self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.name, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        if within_cluster():  # elsewhere the interpreter does it
            _finish()


def watch(
    program: CommandProgram, *, ranks: int | None = None, device: str = "auto", depth: int | None = None,
    timeout: float | None = None, html: str | Path | None = None, trace: str | Path | None = None,
) -> None:  # fmt: skip
    """Run a program on every rank, record it, and print its timeline.

    Args:
        program: the program.
        ranks: the number of processes; None: one per GPU, or 2 without GPUs.
        device: "auto", "cpu" or "cuda".
        depth: how deep modules are recorded; None: repeated blocks and the modules beside them.
        timeout: as in `Cluster.run`.
        html: where an interactive timeline is written; None: nowhere.
        trace: where the trace is written; None: nowhere.

    Raises:
        ValueError: there is no such program.
        RankFailed: the program failed on a rank.
    """
    program.check()
    with _cluster(ranks, device) as cluster:
        try:
            cluster.run(program.run, timeout=timeout, watch=True if depth is None else depth)
        finally:
            if trace is not None and cluster.rank == 0:
                print(f"mpkit: the trace is in {cluster.trace.save(trace)}")
        if cluster.rank:
            return
        timeline = cluster.timeline()
        print(timeline)
        if html is not None:
            timeline.to_html(html)
            print(f"mpkit: an interactive timeline is in {html}")


def _cluster(ranks: int | None, device: str) -> Cluster:
    """Return the ranks: those that torchrun, srun or mpirun have started, if one of these has started this process."""
    if not is_launched():
        return Cluster((_gpus() or 2) if ranks is None else ranks, device)
    cluster = Cluster.from_env(device)
    if ranks not in (None, cluster.ranks):
        raise ValueError(f"--ranks {ranks}: the launcher has started {cluster.ranks}; leave --ranks out here")
    return cluster


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _finish() -> None:
    """Do what Python does at the end of a program; nothing may start threads afterwards."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all that are no daemons
    for child in multiprocessing.active_children():
        if not child.daemon:
            child.join()
    atexit._run_exitfuncs()
