"""Ranks that wait for each other for ever: who waits where, and who never came."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mpkit as mk
from mpkit.common.launch_folder import part
from mpkit.launch.hang import hang
from mpkit.launch.hang.hang import LIMIT, Patience
from mpkit.launch.hang.waits import Sight
from mpkit.launch.process import processes
from mpkit.launch.process.processes import RankProcesses
from mpkit.trace import MEMORY, OP, Kind
from mpkit.trace.trace import RankTrace
from tests.limits import EVENT, PROGRAM


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait are given up only if they can never proceed."""
    monkeypatch.setattr(hang, "WAITING", 1e6)


def hang_message(cluster: mk.Cluster, fn: Callable[..., object]) -> str:
    """What is said of ranks that hang for certain."""
    launch = cluster.launch(fn, ())
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


def test_a_rank_of_a_session_that_is_slow_to_wake_up_has_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 waits in a cell that rank 0, on a busy machine, has yet to begin."""
    watch = hang.HangWatch(tmp_path, 2, RankProcesses(), None, range(2))
    sights = Sight(3, state=1), Sight(4, waiting=True)
    monkeypatch.setattr(watch._watch, "look_at_all", lambda: sights)
    monkeypatch.setattr(hang, "never", lambda trace: True)
    monkeypatch.setattr(hang, "CERTAIN", -1.0)
    launch: Any = SimpleNamespace(trace=mk.Trace([]))
    watch.woken = [0, 1]
    assert not any(watch.look(launch) for _ in range(4))
    watch.woken = [1]
    assert any(watch.look(launch) for _ in range(4))


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


# ---- Ranks that wait for one that does not come, without a time-out: who it is, where, and whether it computes.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Half a second for ten, and as long as a busy machine needs for stacks."""
    monkeypatch.setattr(hang, "NOTICE_AFTER", 0.5)
    monkeypatch.setattr(hang, "SAID_RANKS", 8)
    monkeypatch.setattr(processes, "STACKS_TAKE", 150)
    yield


def test_ranks_wait_in_a_barrier_of_torch_distributed(
    cluster: mk.Cluster, impatient: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fn(ctx):  # type: ignore[no-untyped-def]
        ctx.comm.barrier()
        (tmp_path / str(ctx.rank)).touch()
        while ctx.rank == 2 and len(os.listdir(tmp_path)) < 4:
            time.sleep(0.01)  # else it can keep the others from writing into the folder
        with ctx.record.span("the time of waiting begins when the others wait"):
            while ctx.rank == 2:
                pass
        dist.barrier()

    with pytest.raises(mk.errors.Deadlock, match=r"none has moved for \d+\.\d s") as caught:
        cluster.run(fn, timeout=EVENT / 40)
    found = re.search(
        r'rank 2 is not waiting.*?test_hangs\.py", line (\d+) in fn', str(caught.value), re.DOTALL
    )
    assert found and int(found[1]) - fn.__code__.co_firstlineno in (6, 7)
    # Those that have waited for so long by then: after a pause of the machine, not all three.
    waited = r"ranks? [013,-]+ ha(s|ve) waited for 0\.5 s for rank 2: rank 2 is at test_hangs\.py"
    assert re.search(waited, capsys.readouterr().out)


def test_a_stopped_rank(cluster: mk.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can move: it is said without a time-out, and with the command that helps."""
    monkeypatch.setattr(hang, "WAITING", 1.0)

    def fn(ctx):  # type: ignore[no-untyped-def]
        ctx.comm.barrier()
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if ctx.rank == 0:
            time.sleep(0.6)  # until the others wait
        ctx.comm.barrier()

    launch: Any = cluster.launch(fn, (), sink=print)
    with pytest.raises(mk.errors.Deadlock) as caught:
        launch.finish()
        launch.results()
    words = f"rank 1 is stopped (SIGSTOP, or a debugger): kill -CONT {launch.pids[1]}"
    assert words in str(caught.value)
    assert cluster.run(lambda ctx: ctx.rank) == [0, 1, 2, 3]


def test_who_waits_is_known_while_it_goes(cluster: mk.Cluster, impatient: None, tmp_path: Path) -> None:
    """And no more once it goes on. The ranks that let the others wait go on when this process has seen it."""
    known, forgotten = tmp_path / "known", tmp_path / "forgotten"

    def fn(ctx):  # type: ignore[no-untyped-def]
        while ctx.rank == 3 and not known.exists():
            pass
        ctx.comm.barrier()
        while ctx.rank == 0 and not forgotten.exists():
            pass
        ctx.comm.barrier()

    def tick() -> None:
        if "for rank 3" in (launch.hangs.waiting_for or ""):
            known.touch()
        elif known.exists():
            forgotten.touch()

    launch = cluster.launch(fn, (), sink=lambda line: None, timeout=EVENT)
    launch.finish(0.05, tick)
    assert launch.results() == [None] * 4
    assert launch.hangs.waiting_for is None


# ---- Ranks that take long to start, on a busy machine or since each imports torch: they are starting, and not hung.


@pytest.mark.slow
def test_a_rank_without_a_handler_gets_no_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a machine so busy that ranks use no CPU time for ten seconds, and answer no request."""
    monkeypatch.setattr(hang, "NOTICE_AFTER", 0.2)
    monkeypatch.setattr(processes, "STACKS_TAKE", 1)
    monkeypatch.setattr(hang, "IDLE", 1e9)
    with mk.Cluster(2, device="cpu", start="spawn") as cluster:
        assert cluster.run(signals) == [(True, True)] * 2
    assert (
        "ranks 0-1 have waited for 0.2 s and none uses CPU time: rank 0 is starting"
        in capsys.readouterr().out
    )


def signals(ctx: mk.Context) -> tuple[bool, bool]:
    """Return whether the process that starts ranks ignores the signal for stacks, and this rank handles it."""
    with open(f"/proc/{os.getppid()}/status") as server, open("/proc/self/status") as own:
        ignored, caught = (
            int(next(line for line in file if line.startswith(field)).split()[1], 16)
            for file, field in ((server, "SigIgn"), (own, "SigCgt"))
        )
    bit = 1 << (signal.SIGUSR1 - 1)
    return bool(ignored & bit), bool(caught & bit)


def test_a_rank_writes_the_stack_of_its_main_thread_alone(cluster: mk.Cluster) -> None:
    """The stack of a thread that goes on meanwhile changes while it is read: ranks crashed, one of 200,000 requests."""

    def fn(ctx: mk.Context) -> str:
        threading.Thread(target=time.sleep, args=(PROGRAM,), daemon=True).start()
        os.kill(os.getpid(), signal.SIGUSR1)
        return part(ctx.record.folder, ctx.rank, "stack").read_text()

    for text in cluster.run(fn):
        assert re.fullmatch(
            r'Stack \(most recent call first\):\n  File ".*", line \d+ in fn\n(  File .*\n)+', text
        )


def test_a_timeout_counts_from_when_all_have_started() -> None:
    clock = [0.0]
    for started, ends in ((True, 2.0), (False, LIMIT)):
        patience = Patience(timeout=2.0, look_every=1.0, now=lambda: clock[0])
        sights = (Sight(), Sight(started=started))
        begun = clock[0]
        while not patience.is_over(sights):
            clock[0] += 1.0
        assert clock[0] - begun == ends + 1
