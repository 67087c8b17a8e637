"""Ranks that wait for each other for ever: who waits where, and who never came."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import mpkit as mk
from mpkit.launch.hang import hang
from mpkit.launch.hang.hang import Patience
from mpkit.launch.hang.waits import Sight
from mpkit.launch.process.rank_processes import RankProcesses
from mpkit.trace import MEMORY, OP, Kind
from mpkit.trace.trace import RankTrace
from tests.limits import wait_for


def hang_message(cluster: mk.Cluster, fn: Callable[..., object]) -> str:
    """What is said of ranks that hang for certain: with a grace that is never over, this alone ends them."""
    launch = cluster.launch(fn, (), sink=print, grace=1e6)
    launch.finish()
    with pytest.raises(mk.errors.Deadlock) as caught:
        launch.results()
    return str(caught.value)


def test_a_missing_rank(cluster: mk.Cluster) -> None:
    def fn(ctx):  # type: ignore[no-untyped-def]
        ctx.comm.barrier()
        if ctx.rank != 3:
            ctx.comm.all_reduce(torch.ones(1))

    says = hang_message(cluster, fn)
    assert "rank 0 waits in all_reduce number 1 of ranks 0,1,2,3" in says
    assert "test_hangs.py:" in says and "in fn" in says
    assert "rank 3 never came to all_reduce number 1 of ranks 0,1,2,3: it has finished" in says


def test_crossed_receives(cluster: mk.Cluster) -> None:
    def fn(ctx):  # type: ignore[no-untyped-def]
        if ctx.rank < 2:
            other = 1 - ctx.rank
            ctx.comm.recv(torch.empty(1), other)
            ctx.comm.send(torch.ones(1), other)

    says = hang_message(cluster, fn)
    assert "rank 0 waits in recv from rank 1 (tag 0, number 0)" in says
    assert "rank 1 never sent it: it waits in recv from rank 0" in says


def test_different_order_of_collectives(cluster: mk.Cluster) -> None:
    def fn(ctx):  # type: ignore[no-untyped-def]
        pair = ctx.comm.group([0, 1])
        if ctx.rank == 0:
            ctx.comm.all_reduce(torch.ones(1), pair)
        if ctx.rank == 1:
            ctx.comm.recv(torch.empty(1), 0)

    says = hang_message(cluster, fn)
    assert "rank 1 never came to all_reduce number 0 of ranks 0,1: it waits in recv from rank 0" in says


# ---- patience --------------------------------------------------------------------------------------------------


class Looks:
    """Looks at two ranks that make no progress, on a clock that this test sets."""

    def __init__(self, timeout: float | None = None) -> None:
        self.time = 0.0
        self.patience = Patience(timeout, look_every=0.25, now=lambda: self.time)

    def look(self, after: float, times: int = 1, **found: object) -> bool:
        """Look several times, each so many seconds after the last, and return whether to give up then."""
        for _ in range(times):
            self.time += after
            over = self.patience.is_over((Sight(3), Sight(3, waiting=True)), **found)  # type: ignore[arg-type]
        return over


@pytest.mark.parametrize(("end", "says"), [(0, "; in backward"), (9, "; last seen at the end of wait")])
def test_a_rank_is_in_what_it_has_not_ended(end: int, says: str) -> None:
    """A backward that waited, and goes on, is where its rank is: the wait within it has ended."""
    ops = np.zeros(2, OP)
    ops["kind"], ops["start"], ops["end"] = [Kind.BACKWARD, Kind.WAIT], [1, 2], [end, 3]
    assert hang._describe_last(RankTrace(ops, np.empty(0, MEMORY), [""])) == says


def test_a_pause_of_the_whole_machine_counts_as_two_looks() -> None:
    looks = Looks(timeout=1.0)
    assert not looks.look(0.25, 5), "the first look begins, and four make one second"
    assert looks.look(0.125)
    looks = Looks(timeout=1.0)
    assert not looks.look(3600.0, 3)
    assert looks.look(0.125)


def test_ranks_that_run_are_given_up_on_a_timeout_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "LIMIT", 2.0)
    assert not Looks().look(0.25, 1000, running={0})
    assert Looks(timeout=1.0).look(0.25, 6, running={0})
    looks = Looks()
    assert not looks.look(0.25, 9), "idle for two seconds"
    assert not looks.look(0.25, 1000, running={1})
    assert looks.look(0.25)


def test_ranks_that_can_never_proceed_are_given_up_once_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "never", lambda trace: True)
    looks = Looks()
    assert not looks.look(0.25, 1000, trace=mk.Trace([]), running={1})
    assert not looks.look(0.25, 2, trace=mk.Trace([]))
    assert looks.look(0.25, trace=mk.Trace([])), "half a second is over"


def test_progress_starts_the_time_anew() -> None:
    looks = Looks(timeout=1.0)
    assert not looks.look(0.25, 5)
    assert not looks.patience.is_over((Sight(4), Sight(3, waiting=True)))
    assert not looks.look(0.25, 5)
    assert not looks.look(0.25, stopped={1}), "and so does a rank that somebody stops"


def test_the_system_reports_which_ranks_run() -> None:
    programs = [subprocess.Popen(["sh", "-c", code]) for code in ("while :; do :; done", "exec sleep 1000")]
    try:
        processes = RankProcesses([each.pid for each in programs])
        wait_for(lambda: processes.running_ranks() == {0})
        os.kill(processes.pids[0], signal.SIGSTOP)
        wait_for(lambda: processes.running_ranks() == set())
        assert processes.stopped_pids() == {0: processes.pids[0]}
    finally:
        for each in programs:
            each.kill()
            each.wait()


def test_of_a_rank_that_waits_its_main_thread_counts() -> None:
    """A thread of gloo's can spin on a connection whose other end is gone."""
    code = """
import threading, time
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
time.sleep(1000)
"""
    program = subprocess.Popen([sys.executable, "-c", code])
    try:
        every, main = RankProcesses([program.pid]), RankProcesses([program.pid])
        wait_for(lambda: len(list(Path(f"/proc/{program.pid}/task").iterdir())) == 2)
        wait_for(lambda: main.running_ranks({0}) == set() and every.running_ranks() == {0})
    finally:
        program.kill()
        program.wait()


@pytest.mark.alone
def test_a_real_pause_ends_no_rank(
    cluster: mk.Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This process, the fork server and all ranks are stopped for longer than ranks are given, and go on."""
    monkeypatch.setattr(hang, "LIMIT", 1.0)
    computes, paused = tmp_path / "computes", tmp_path / "paused"

    def fn(ctx):  # type: ignore[no-untyped-def]
        ctx.comm.barrier()
        if ctx.rank == 0:
            computes.touch()
            while not paused.exists():
                pass
            begun = time.process_time()
            while time.process_time() < begun + 0.3:  # some looks long
                pass
        ctx.comm.barrier()
        return ctx.rank

    helpers: list[subprocess.Popen[bytes]] = []

    def tick() -> None:
        if computes.exists() and not helpers:
            pids = " ".join(map(str, [os.getpid(), cluster.fork_server_pid, *launch.pids]))
            script = f"kill -STOP {pids}; sleep 2; kill -CONT {pids}; touch {paused}"
            helpers.append(subprocess.Popen(["sh", "-c", script], start_new_session=True))

    launch = cluster.launch(fn, (), sink=print)
    launch.finish(0.05, tick)
    assert launch.results() == [0, 1, 2, 3]
    assert [helper.wait() for helper in helpers] == [0]
