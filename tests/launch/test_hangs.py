"""Ranks that wait for each other for ever: who waits where, and who never came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mpkit as mk
from mpkit.launch.hang import hang
from mpkit.launch.hang.hang import Patience
from mpkit.launch.hang.waits import Sight
from mpkit.launch.process.processes import RankProcesses
from mpkit.trace import MEMORY, OP, Kind
from mpkit.trace.trace import RankTrace


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


def test_a_rank_of_a_session_that_is_slow_to_wake_up_has_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 waits in a cell that rank 0, on a busy machine, has yet to begin."""
    watch = hang.HangWatch(tmp_path, 2, RankProcesses(), None)
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
