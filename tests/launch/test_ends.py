"""A launch ends, whatever fails in the process that follows it; and its cluster is usable again."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpkit as mk
from mpkit.launch import launch as launch_module
from mpkit.launch.process import run_folder
from tests.limits import EVENT, wait_for, wait_until_gone


def endless(cluster: mk.Cluster) -> Any:
    """A training that does not end by itself, with its ranks started."""
    data = [(torch.ones(2, 1), torch.ones(2, 1))]
    run = cluster.train(
        torch.nn.Linear(1, 1), data, mk.Plan.ddp(2), loss=torch.nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=10**6,
    )  # fmt: skip
    wait_for(lambda: run.pids)
    return run


def still_works(cluster: mk.Cluster) -> None:
    assert cluster.run(lambda ctx: ctx.rank) == [0, 1]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # it ends where a file is opened
def test_whatever_ends_the_thread_ends_the_run(
    clusters: Callable[[int], mk.Cluster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = clusters(2)

    def unreadable(self: object) -> None:
        raise OSError(24, "Too many open files")

    run = endless(cluster)
    with monkeypatch.context() as patch:
        patch.setattr(launch_module.Launch, "_look", unreadable)
        with pytest.raises(OSError, match="Too many open files"):
            run.wait()
    assert (run.status, type(run.error)) == ("failed", OSError)
    wait_until_gone(run.pids)

    run = endless(cluster)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(run._thread.ident), ctypes.py_object(SystemExit)
    )
    with pytest.raises(mk.errors.MpkitError, match="was ended by SystemExit"):
        run.wait()
    wait_until_gone(run.pids)
    still_works(cluster)


def test_a_kept_run_holds_no_file(clusters: Callable[[int], mk.Cluster]) -> None:
    cluster = clusters(2)
    kept = [cluster.launch(lambda ctx: ctx.comm.barrier(), ())]
    kept[0].finish()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        kept.append(cluster.launch(lambda ctx: ctx.comm.barrier(), ()))
        kept[-1].finish()
    assert len(os.listdir("/proc/self/fd")) == before


def ends_with_its_group(ctx: Any) -> int:
    """Let a DistributedDataParallel be the last to hold the group, of which a thread lets go of a profiled collective.

    A thread that lets go of it needs Python's lock, under which the group's destructor would wait for the thread.
    """
    dist.init_process_group()
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    with torch.autograd.profiler.profile():
        work = dist.all_reduce(torch.ones(10_000_000), async_op=True)
        dist.destroy_process_group()
        del work, ddp
    return ctx.rank


def test_a_program_that_frees_its_group_ends(clusters: Callable[..., mk.Cluster]) -> None:
    assert clusters(2).run(ends_with_its_group, timeout=EVENT) == [0, 1]


LEAVES = """
import os, sys, mpkit as mk
cluster = mk.Cluster(1, device="cpu")
cluster.run(lambda ctx: ctx.rank)
cluster.close()
os._exit(0)  # no exit handler runs, and the helper has ended in order
"""


def test_a_folder_that_nobody_holds_is_removed_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mpkit-run-of-another-version").mkdir()
    subprocess.run([sys.executable, "-c", LEAVES], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True)
    assert len([*tmp_path.glob("mpkit-run-*")]) == 2
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, other = run_folder.empty_folder(), run_folder.empty_folder()
    assert one.parent == other.parent
    assert {path.name for path in tmp_path.iterdir()} == {"mpkit-run-of-another-version", one.parent.name}
    kept = run_folder.keep(other)
    run_folder.remove_unheld(one.parent)  # this process holds it
    run_folder.remove_unheld(kept)  # it is to stay
    assert one.is_dir() and kept.is_dir()
