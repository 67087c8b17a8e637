"""Cluster.run: functions of all kinds reach the ranks, results and prints come back."""

import importlib
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import mpkit as mk
from mpkit.launch.process import fork_server
from tests.limits import PROGRAM, wait_until_gone
from tests.serial import Clusters


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


@pytest.mark.slow
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


@pytest.mark.parametrize(("make", "says"), [
    (lambda: mk.Cluster(0), r"Cluster\(ranks=0\): a number of processes, 1 or more"),
    (lambda: mk.Cluster("4"), r"Cluster\(ranks='4'\)"),  # type: ignore[arg-type]
    (lambda: mk.Cluster(10_000), "10000 processes on this machine"),
    (lambda: mk.Cluster(2, device="cdua"), "device='cdua'.*did you mean 'cuda'"),
    (lambda: mk.Cluster(2, start="thread"), "there are 'fork' and 'spawn'"),
])  # fmt: skip
def test_mistakes_in_making_one(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.slow
def test_a_helper_process_that_nobody_uses_ends_and_another_goes_with_its_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server, "IDLE", 0.3)
    monkeypatch.setattr(fork_server, "IDLE_MARGIN", 0.2)
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


# ---- Environment variables: ranks have those of the launch, and copies of a program do not each start ranks.


def test_ranks_have_the_environment_of_the_launch(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what changed after the cluster was made; and an interface for gloo is the user's."""
    cluster = clusters(2)
    names = ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTHONPATH", "HOME")

    def look(ctx):  # type: ignore[no-untyped-def]
        return [os.environ.get(name) for name in names]

    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.delenv("HOME", raising=False)
    assert cluster.run(look) == [["INFO", "lo", "eth7", "/somewhere", None]] * 2
    monkeypatch.undo()
    found = cluster.run(look)[0]
    assert found[0] == os.environ.get("NCCL_DEBUG") and found[4] == os.environ.get("HOME")


@pytest.mark.parametrize(("variables", "says"), [
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, r"RANK=1 and WORLD_SIZE=2 .* as torchrun sets"),
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, r"as srun sets them: 4 copies"),
    ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, r"start it once, with `python \S+\.py`"),
])  # fmt: skip
def test_copies_of_a_program_start_no_ranks(
    clusters: Clusters, variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would train a model of its own."""
    cluster = clusters(2)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        mk.Cluster(2, device="cpu")
    with pytest.raises(ValueError, match=says):
        cluster.run(lambda ctx: ctx.rank)


def test_a_rank_on_the_cpu_sees_no_gpu(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 takes the accelerator that it sees, and a second rank found no second GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert clusters(2).run(lambda ctx: os.environ["CUDA_VISIBLE_DEVICES"]) == ["", ""]


# ---- What a process has set for all of its code holds on its ranks too; what it has patched is named.


def computed(_: Any = None) -> list[Any]:
    return [str(torch.zeros(1).dtype), np.geterr()["divide"]]


def test_ranks_have_the_settings_of_the_process_that_launches_them(clusters: Clusters) -> None:
    before, errors = torch.get_default_dtype(), np.geterr()
    torch.set_default_dtype(torch.float64)
    np.seterr(divide="raise")
    try:
        assert clusters(2).run(computed) == [["torch.float64", "raise"]] * 2
    finally:
        torch.set_default_dtype(before)
        np.seterr(**errors)
    assert clusters(2).run(computed) == [computed()] * 2


def silu(_: Any) -> list[float]:
    made: list[float] = nn.SiLU()(torch.tensor([-1.0, 0.5, 2.0])).tolist()
    return made


class Norm(nn.Identity):
    """Not what a user expects of nn.LayerNorm."""


def test_patches_of_libraries_are_named(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not carried to ranks; where nothing is patched, nothing is said."""
    here = silu(None)
    assert clusters(2).run(silu) == [here, here]
    with monkeypatch.context() as patched:
        patched.setattr(nn.SiLU, "forward", lambda self, x: 3 * x)
        patched.setattr(nn, "LayerNorm", Norm)
        words = r"torch\.nn\.LayerNorm, torch\.nn\.modules\.activation\.SiLU\.forward as the library has it"
        with pytest.warns(mk.errors.UnwisePlan, match=words):
            assert clusters(2).run(silu) == [here, here]


def test_autocast_around_a_launch_is_reported(clusters: Clusters) -> None:
    with torch.autocast("cpu"), pytest.warns(mk.errors.UnwisePlan, match="precision='bf16'"):
        clusters(2).run(silu)


def test_a_module_edited_since_its_import_is_reported(
    clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "edited_net.py"
    file.write_text("def scale(ctx):\n    return 2\n\ndef other(ctx):\n    return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("edited_net")
    assert clusters(2).run(net.scale) == [2, 2]
    file.write_text("# another line\ndef scale(ctx):\n    return 30\n\ndef other(ctx):\n    return 0\n")
    with pytest.warns(mk.errors.UnwisePlan, match=r"^edited_net\.scale: ranks run the file as it is now"):
        assert clusters(2).run(net.scale) == [30, 30]
    importlib.reload(net)
    assert clusters(2).run(net.scale) == [30, 30]


# ---- What each forked rank draws is its own.


def draws(_: Any = None) -> dict[str, str]:
    """Draw in every way that programs draw without having set a seed."""
    drawn = {
        "torch.rand": torch.rand(2),
        "torch.randperm": torch.randperm(30),
        "torch.initial_seed": torch.initial_seed(),
        "Gamma": torch.distributions.Gamma(1.0, 1.0).sample(),
        "nn.Linear": nn.Linear(2, 2).weight.tolist(),
        "nn.Dropout": nn.Dropout()(torch.ones(60)),
        "DataLoader": [int(each) for each in DataLoader(range(30), shuffle=True)],  # type: ignore[arg-type]
        "np.random.rand": np.random.rand(2),
        "np.random.default_rng": np.random.default_rng().random(),
        "random.random": random.random(),
        "uuid": uuid.uuid4(),
        "tempfile": next(tempfile._get_candidate_names()),  # type: ignore[attr-defined]
    }
    return {name: repr(value) for name, value in drawn.items()}


def assert_all_differ(drawn: list[dict[str, str]]) -> None:
    for name in drawn[0]:
        assert len({each[name] for each in drawn}) == len(drawn), f"{name}: {[each[name] for each in drawn]}"


def test_ranks_draw_other_numbers_than_each_other_and_than_in_the_call_before(cluster: mk.Cluster) -> None:
    assert_all_differ([draw for _ in range(2) for draw in cluster.run(draws)])


def test_to_end_what_has_finished_leaves_its_results(clusters: Clusters) -> None:
    launch = clusters(1).launch(lambda ctx: ctx.rank, ())
    launch.finish()
    launch.end()
    assert not launch.stopped and launch.results() == [0]
