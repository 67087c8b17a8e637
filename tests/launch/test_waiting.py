"""Ranks that wait for one that does not come, without a time-out: who it is, where, and whether it computes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import mpkit as mk
from mpkit.launch.hang import hang
from mpkit.launch.process import processes
from tests.limits import EVENT


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
        r'rank 2 is not waiting.*?test_waiting\.py", line (\d+) in fn', str(caught.value), re.DOTALL
    )
    assert found and int(found[1]) - fn.__code__.co_firstlineno in (6, 7)
    # Those that have waited for so long by then: after a pause of the machine, not all three.
    waited = r"ranks? [013, and]+ ha(s|ve) waited for 0\.5 s for rank 2: rank 2 is at test_waiting\.py"
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
        if "for rank 3" in (launch.waiting_for or ""):
            known.touch()
        elif known.exists():
            forgotten.touch()

    launch = cluster.launch(fn, (), sink=lambda line: None, timeout=EVENT)
    launch.finish(0.05, tick)
    assert launch.results() == [None] * 4
    assert launch.waiting_for is None
