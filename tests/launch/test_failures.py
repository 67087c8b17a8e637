"""A rank raises, is killed, leaves, hangs: all ranks go, the error says who and where, the cluster stays usable."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpkit as mk
from mpkit.common.launch_folder import reserve, write_error
from mpkit.launch import launch as launch_module
from mpkit.launch.failure import failure
from mpkit.launch.process import run_folder
from mpkit.models import MLP
from mpkit.trace import MEMORY, OP, RankTrace, Trace
from tests.limits import EVENT, wait_for, wait_until_gone
from tests.serial import Clusters


def still_works(cluster: mk.Cluster) -> None:
    assert cluster.run(lambda ctx: ctx.comm.all_reduce(torch.ones(1)).item()) == [4.0] * 4


@pytest.mark.parametrize("secondary", [False, True])
def test_of_several_errors_the_earliest_is_reported(tmp_path: Path, secondary: bool) -> None:
    """Whichever rank is first to end; also where all of them are of closed connections."""
    reserve(tmp_path, 3)
    for rank, time in enumerate((30.0, 10.0, 20.0)):
        write_error(tmp_path, rank, {
            "type": "DistBackendError", "message": "closed", "traceback": "", "folded": "", "time": time,
            "secondary": secondary, "other": None,
        })  # fmt: skip
    trace = Trace([RankTrace(np.empty(0, OP), np.empty(0, MEMORY), [], "failed") for _ in range(3)])
    error = failure(tmp_path, {2: 1, 0: 1, 1: 1}, trace)
    assert error is not None and error.rank == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_is_killed(cluster: mk.Cluster, how: signal.Signals) -> None:
    def die(ctx):  # type: ignore[no-untyped-def]
        with ctx.record.step(5), ctx.record.span("the last thing"):
            if ctx.rank == 1:
                os.kill(os.getpid(), how)
            ctx.comm.barrier()

    with pytest.raises(mk.RankFailed, match=f"rank 1 of 4 was killed by {how.name} in step 5") as caught:
        cluster.run(die)
    assert caught.value.signal == how.name
    assert "Its last recorded op: compute" in str(caught.value)
    still_works(cluster)


@pytest.mark.parametrize("leave", [sys.exit, os._exit])
def test_a_rank_leaves_early(cluster: mk.Cluster, leave: object) -> None:
    with pytest.raises(mk.RankFailed, match="rank 3 of 4"):
        cluster.run(lambda ctx: leave(0) if ctx.rank == 3 else ctx.comm.barrier())  # type: ignore[operator]
    still_works(cluster)


def test_children_of_ranks_go_with_them(cluster: mk.Cluster, tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def fail(ctx):  # type: ignore[no-untyped-def]
        if ctx.rank == 0:
            child = subprocess.Popen(["sleep", "1000"])
            note.write_text(str(child.pid))
            raise RuntimeError("with a child left behind")
        ctx.comm.barrier()

    with pytest.raises(mk.RankFailed):
        cluster.run(fail)
    wait_until_gone([int(note.read_text())])


@pytest.mark.slow
def test_the_fork_server_dies(cluster: mk.Cluster) -> None:
    """Whoever killed it, the ranks go with it and the next run has a new one."""
    with pytest.raises(mk.RankFailed, match="process that ranks are started from has died"):
        cluster.run(
            lambda ctx: os.kill(os.getppid(), signal.SIGKILL) if ctx.rank == 0 else ctx.comm.barrier()
        )
    still_works(cluster)


@pytest.mark.alone
def test_ctrl_c_stops_the_ranks(cluster: mk.Cluster, tmp_path: Path) -> None:
    """As in a notebook: an interrupt of the process that waits."""
    waits = os.getpid()

    def work(ctx):  # type: ignore[no-untyped-def]
        (tmp_path / str(ctx.rank)).write_text(str(os.getpid()))
        ctx.comm.barrier()
        if ctx.rank == 0:
            os.kill(waits, signal.SIGINT)
        while True:
            pass

    with pytest.raises(KeyboardInterrupt):
        cluster.run(work)
    wait_until_gone([int((tmp_path / str(rank)).read_text()) for rank in range(4)])
    still_works(cluster)


LONG = """
import os, pathlib, signal, mpkit as mk
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
def work(ctx):
    pathlib.Path(f"pid{ctx.rank}").write_text(str(os.getpid()))
    ctx.comm.barrier()
    if ctx.rank == 0:
        print("ready", flush=True)
    while True:
        pass
mk.Cluster(3, device="cpu").run(work)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [
    signal.SIGKILL,
    *(pytest.param(s, marks=pytest.mark.soak) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
])  # fmt: skip
def test_no_rank_outlives_the_script(how: signal.Signals, tmp_path: Path) -> None:
    script = subprocess.Popen(
        [sys.executable, "-u", "-c", LONG], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert script.stdout is not None
        assert b"ready" in script.stdout.readline()
        pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(3)]
        script.send_signal(how)
        wait_until_gone(pids)
        script.stdout.close()
        script.wait(EVENT)
    finally:
        script.kill()


TALKS = """
import os, pathlib, mpkit as mk
def work(ctx):
    pathlib.Path(f"pid{ctx.rank}").write_text(str(os.getpid()))
    ctx.comm.barrier()
    while True:
        print("y" * 1000)
mk.Cluster(2, device="cpu").run(work)
"""


@pytest.mark.slow
def test_a_program_whose_output_nothing_reads_ends_as_others_do(tmp_path: Path) -> None:
    """As in `python train.py | head -1`: exit code 141, no traceback, and nothing is left behind."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    script = subprocess.Popen(
        [sys.executable, "-c", TALKS], cwd=tmp_path, env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert script.stdout is not None and script.stderr is not None
        assert script.stdout.readline().endswith(b"yyy\n")
        script.stdout.close()
        assert script.wait(EVENT) == 128 + signal.SIGPIPE
        assert b"Traceback" not in script.stderr.read()
        wait_until_gone([int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)])
        assert not [*temporary.iterdir()]
    finally:
        script.kill()
        script.stderr.close()  # type: ignore[union-attr]


# ---- A launch ends, whatever fails in the process that follows it; and its cluster is usable again.


def endless(cluster: mk.Cluster) -> Any:
    """A training that does not end by itself, with its ranks started."""
    data = [(torch.ones(2, 1), torch.ones(2, 1))]
    run = cluster.train(
        torch.nn.Linear(1, 1), data, mk.Plan.ddp(2), loss=torch.nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=10**6,
    )  # fmt: skip
    wait_for(lambda: run.pids)
    return run


def both_still_work(cluster: mk.Cluster) -> None:
    assert cluster.run(lambda ctx: ctx.rank) == [0, 1]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # it ends where a file is opened
def test_whatever_ends_the_thread_ends_the_run(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
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
    both_still_work(cluster)


def test_a_kept_run_holds_no_file(clusters: Clusters) -> None:
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
import os
from mpkit.launch.process import run_folder
run_folder.empty_folder()
os._exit(0)  # no exit handler runs
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


# ---- Twenty runs, in each a rank killed at a moment of chance: nothing is left or hangs, nothing recorded is lost.


def living_children(of: int) -> list[int]:
    """Processes whose parent is `of`, without zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == of and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))])
def test_a_rank_is_killed_at_some_moment(clusters: Clusters, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    ranks = chance.choice([2, 3, 4])
    cluster = clusters(ranks)
    torch.manual_seed(seed)
    model = MLP(8, 4, width=32, layers=6)
    data = [(torch.randn(24, 8), torch.randn(24, 4)) for _ in range(3)]
    run = cluster.train(
        model,
        data,
        mk.Plan.gpipe(ranks, 6),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        steps=100_000,  # far longer than it will live
    )
    fork_server = cluster.fork_server_pid
    ops_wanted = chance.choice([0, 1, 50, 500, 2000])  # what the victim has recorded by then, at least
    victim = chance.randrange(ranks)
    wait_for(lambda: run.done or (run.pids and len(run.trace.ranks[victim].ops) >= ops_wanted))
    pids = run.pids
    recorded = [len(rank.ops) for rank in run.trace.ranks]
    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises(mk.RankFailed, match=f"rank {victim} of {ranks} was killed by SIGKILL") as caught:
        run.wait()
    assert caught.value.signal == "SIGKILL"
    assert not set(pids) & set(living_children(fork_server))

    assert all(len(rank.ops) >= before for rank, before in zip(run.trace.ranks, recorded, strict=True))
    again = mk.Trace.load(run.trace.save(tmp_path / "killed.mpkit"))
    assert [len(rank.ops) for rank in again.ranks] == [len(rank.ops) for rank in run.trace.ranks]
    assert run.timeline().world_size == ranks  # replays as far as it goes
    assert len(run.losses) == len(run.trace.losses)
