"""Cluster.run: functions of all kinds reach the ranks, results and prints come back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mpkit as mk
from mpkit.launch.process import fork_server_client
from tests.limits import PROGRAM, wait_until_gone


def doubled(ctx, value):  # type: ignore[no-untyped-def]
    return 2 * value * ctx.world_size


def test_one_thread_a_rank_and_fresh_processes(cluster: mk.Cluster) -> None:
    first = cluster.run(lambda ctx: (os.getpid(), torch.get_num_threads()))
    second = cluster.run(lambda ctx: (os.getpid(), torch.get_num_threads()))
    assert {threads for _, threads in first + second} == {1}
    assert len({pid for pid, _ in first + second}) == 8


def test_prints_are_labelled_and_in_order(cluster: mk.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def talk(ctx):  # type: ignore[no-untyped-def]
        for turn in range(ctx.world_size):
            ctx.comm.barrier()
            if ctx.rank == turn:
                print(f"line one of {turn}\nline two of {turn}")
                print("a warning", file=sys.stderr)
            ctx.comm.barrier()

    cluster.run(talk)
    lines = capsys.readouterr().out.splitlines()
    expected = []
    for rank in range(4):
        for text in (f"line one of {rank}", f"line two of {rank}", "a warning"):
            expected.append(f"[rank {rank}] {text}")
    assert lines == expected


def test_endless_printing_is_cut(cluster: mk.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    from mpkit.common.launch_folder import OUTPUT_LIMIT

    def shout(ctx):  # type: ignore[no-untyped-def]
        if ctx.rank == 0:
            for _ in range(2 * OUTPUT_LIMIT // 1_000_000):
                print("x" * 1_000_000)

    cluster.run(shout)
    printed = capsys.readouterr().out
    assert len(printed) < 1.2 * OUTPUT_LIMIT
    assert "the rest is left out" in printed


SCRIPT = """
import torch
import mpkit as mk

class Scale(torch.nn.Module):
    def forward(self, x):
        return 3 * x

def work(ctx, model):
    return float(model(ctx.comm.all_reduce(torch.ones(1))))

cluster = mk.Cluster(ranks=2, device="cpu")
print(cluster.run(work, Scale()), cluster.run(lambda ctx: ctx.rank))
"""

BEFORE = """
import sys, torch, mpkit
print({"torch._dynamo", "mpkit.strategies.prepare.prepare"} & sys.modules.keys())
"""

AFTER = """
import gc, threading
import helper

print(cluster.run(helper.work))
for thread in threading.enumerate():
    if thread.name == "mpkit-import-ahead":
        thread.join()
print({"torch._dynamo", "mpkit.strategies.prepare.prepare"} <= sys.modules.keys(), gc.isenabled())
"""


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    """Its functions and classes reach the ranks, and a module beside it does, but nothing from the current folder:
    neither a learner's random.py nor a stranger's torch.py. Meanwhile a thread imports what the first training needs.
    """
    here, folder = tmp_path / "here", tmp_path / "folder"
    here.mkdir()
    folder.mkdir()
    for name in ("random", "types", "select", "torch", "mpkit", "sitecustomize", "xmlrpc"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'taken')!r}, 'a').write(__name__)\n")
    (folder / "helper.py").write_text("def work(ctx):\n    return ctx.rank + 100\n")
    (folder / "script.py").write_text(BEFORE + SCRIPT + AFTER)
    command = [sys.executable, str(folder / "script.py")]
    done = subprocess.run(command, cwd=here, text=True, capture_output=True, timeout=PROGRAM)
    assert done.stdout.splitlines() == ["set()", "[6.0, 6.0] [0, 1]", "[100, 101]", "True True"], done.stderr
    assert not (tmp_path / "taken").exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mk.Cluster(0), r"Cluster\(ranks=0\): a number of processes, 1 or more"),
        (lambda: mk.Cluster("4"), r"Cluster\(ranks='4'\)"),  # type: ignore[arg-type]
        (lambda: mk.Cluster(10_000), "10000 processes on this machine"),
        (lambda: mk.Cluster(2, device="gpu"), "did you mean 'cuda'"),
        (lambda: mk.Cluster(2, start="thread"), "there are 'fork' and 'spawn'"),
    ],
)
def test_mistakes_in_making_one(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_a_helper_process_that_nobody_uses_ends_and_another_goes_with_its_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server_client, "IDLE", 0.3)
    monkeypatch.setattr(fork_server_client, "IDLE_MARGIN", 0.2)
    with mk.Cluster(ranks=2, device="cpu") as cluster:
        first = cluster.run(lambda ctx: (time.sleep(1.0), os.getppid())[1])[0]
        wait_until_gone([first])
        assert cluster.fork_server_pid is None
        other = cluster.resized(3)
        pids = other.run(lambda ctx: (os.getpid(), os.getppid()))
        assert len(pids) == 3 and first not in {server for _, server in pids}
    for pid in {pid for pair in pids for pid in pair}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(ValueError, match=r"closed; make a new one: mk\.Cluster\(ranks=2\)"):
        cluster.run(doubled, 1)
    with pytest.raises(ValueError, match="this cluster is closed"):
        other.run(doubled, 1)
    assert other.fork_server_pid is None
