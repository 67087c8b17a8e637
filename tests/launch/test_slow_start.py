"""Ranks that take long to start, on a busy machine or since each imports torch: they are starting, and not hung."""

from __future__ import annotations

import os
import signal

import pytest

import mpkit as mk
from mpkit.launch.hang import hang
from mpkit.launch.hang.hang import LIMIT, Patience
from mpkit.launch.hang.waits import Sight
from mpkit.launch.process import processes


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
        "ranks 0 and 1 have waited for 0.2 s and none uses CPU time: rank 0 is starting"
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


def test_a_timeout_counts_from_when_all_have_started() -> None:
    clock = [0.0]
    for started, ends in ((True, 2.0), (False, LIMIT)):
        patience = Patience(timeout=2.0, look_every=1.0, now=lambda: clock[0])
        sights = (Sight(), Sight(started=started))
        begun = clock[0]
        while not patience.is_over(sights):
            clock[0] += 1.0
        assert clock[0] - begun == ends + 1
