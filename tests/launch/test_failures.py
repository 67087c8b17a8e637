"""A rank raises, is killed, leaves, hangs: all ranks go, the error says who and where, the cluster stays usable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mpkit as mk
from mpkit.common.launch_folder import reserve, write_error
from mpkit.launch.failure import failure
from mpkit.trace import MEMORY, OP, RankTrace, Trace
from tests.limits import EVENT, wait_until_gone


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


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        *(pytest.param(s, marks=pytest.mark.soak) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
    ],
)
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
