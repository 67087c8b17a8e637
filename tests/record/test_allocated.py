"""On a GPU the ledger is brought up to torch's allocator. No GPU is needed: FakeCuda is told what is allocated."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpkit.trace import CATEGORIES, Kind, read_rank
from mpkit.trace.record import recorder as module
from mpkit.trace.record.memory import DeviceAllocator
from mpkit.trace.record.recorder import Recorder


class FakeCuda:
    """The allocator's statistics of torch.cuda, of an allocator that only counts."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def take(self, *nbytes: int) -> None:
        """Allocate; free where a number is negative."""
        for one in nbytes:
            self.now += one
            self.peak = max(self.peak, self.now)

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        return {"allocated_bytes": {"all": {"current": self.now, "peak": self.peak}}}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peak = self.now


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(
        module, "allocated_on", lambda device, ledger: DeviceAllocator(fake, torch.device("cpu"), ledger)
    )
    return fake


def totals(folder: Path) -> list[int]:
    """What was held in all after each record."""
    return list(accumulate(read_rank(folder, 0).memory["delta"].tolist()))


def test_temporaries_are_a_spike_and_what_stays_is_counted(tmp_path: Path, cuda: FakeCuda) -> None:
    record = Recorder(tmp_path, 0)
    weight = torch.zeros(100)
    cuda.take(400)
    record.ledger.track(weight, "params")
    cuda.take(64)  # a batch: in no category
    op = record.begin(Kind.FORWARD)
    cuda.take(1000, -1000)
    record.end(op)
    assert max(totals(tmp_path)) == 1464
    assert record.ledger.held == dict.fromkeys(CATEGORIES, 0) | {"params": 400, "buffers": 64}
    cuda.take(-64)
    op = record.begin(Kind.FORWARD)
    record.end(op)
    assert record.ledger.held["buffers"] == 0
    assert max(totals(tmp_path)) == 1464  # the old peak is not told again


def test_communication_within_an_action_does_not_look(tmp_path: Path, cuda: FakeCuda) -> None:
    record = Recorder(tmp_path, 0)
    outer = record.begin(Kind.FORWARD)
    cuda.take(8)
    record.end(record.begin(Kind.SEND))
    record.end(record.begin(Kind.FORWARD))
    assert totals(tmp_path) == []
    record.end(outer)
    assert totals(tmp_path) == [8, 0, 8]


@given(st.lists(st.tuples(st.sampled_from(["named", "unnamed", "freed", "op"]), st.integers(1, 10**6))))
def test_after_each_action_the_ledger_holds_what_is_allocated(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, int]]
) -> None:
    folder, fake = tmp_path_factory.mktemp("ranks"), FakeCuda()
    record = Recorder(folder, 0)
    record.allocated = DeviceAllocator(fake, torch.device("cpu"), record.ledger)
    named: list[int] = []
    most = 0
    for what, nbytes in acts:
        if what == "named":
            named.append(nbytes)
            record.ledger.change(("activations", nbytes))
        elif what == "freed" and named:
            nbytes = -named.pop()
            record.ledger.change(("activations", nbytes))
        elif what == "freed":
            continue
        if what == "op":
            record.end(record.begin(Kind.COMPUTE))
            assert sum(record.ledger.held.values()) == fake.now
        else:
            fake.take(nbytes)
        most = max(most, fake.now)
    record.end(record.begin(Kind.COMPUTE))
    assert max(totals(folder), default=0) == most
