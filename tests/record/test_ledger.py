"""The ledger counts each storage once, for as long as it lives."""

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from mpkit.trace import CATEGORIES, Kind, read_rank
from mpkit.trace.record.ledger import Ledger
from mpkit.trace.record.recorder import Recorder


@pytest.fixture
def record(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path, 0)


def written(folder: Path) -> dict[str, int]:
    """Bytes by category, summed up from the file; those of nothing left out."""
    memory = read_rank(folder, 0).memory
    sums = {name: int(memory["delta"][memory["category"] == n].sum()) for n, name in enumerate(CATEGORIES)}
    return {name: nbytes for name, nbytes in sums.items() if nbytes}


def held(ledger: Ledger) -> dict[str, int]:
    return {name: nbytes for name, nbytes in ledger.held.items() if nbytes}


def test_a_storage_counts_once_and_until_it_dies(tmp_path: Path, record: Recorder) -> None:
    tensor = torch.zeros(10, 10)
    view = tensor[3:5].t()
    record.ledger.track(view, "grads")  # the whole storage lives as long as the view
    record.ledger.track(tensor, "params")  # the first category wins
    assert held(record.ledger) == written(tmp_path) == {"grads": 400}
    del tensor
    assert held(record.ledger) == {"grads": 400}
    del view
    assert held(record.ledger) == written(tmp_path) == {}
    assert list(read_rank(tmp_path, 0).memory["delta"]) == [400, -400]


def test_what_autograd_alone_keeps_alive_is_still_held(record: Recorder) -> None:
    x = torch.zeros(8, requires_grad=True)
    y = (2 * x).exp()  # exp's backward needs its output
    record.ledger.track(y, "activations")
    total = y.sum()
    del y
    gc.collect()
    assert held(record.ledger) == {"activations": 32}
    total.backward()
    assert held(record.ledger) == {}


def test_a_storage_that_is_resized_is_counted_anew(record: Recorder) -> None:
    tensor = torch.zeros(10)
    record.ledger.track(tensor, "params")
    tensor.untyped_storage().resize_(0)  # as FSDP frees a shard
    record.ledger.track(tensor, "params")
    assert held(record.ledger) == {}
    tensor.untyped_storage().resize_(40)
    record.ledger.track(tensor, "params")
    assert held(record.ledger) == {"params": 40}


def test_deaths_in_the_middle_of_recording_are_all_written(tmp_path: Path, record: Recorder) -> None:
    """The garbage collector finds cycles of tensors whenever it pleases, also while a change is being written."""

    class Knot:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.itself = tensor, self

    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for number in range(500):
            index = record.begin(Kind.FORWARD)
            knot = Knot(torch.zeros(number + 1))
            record.ledger.track(knot.tensor, "activations")
            del knot
            record.end(index)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    memory = read_rank(tmp_path, 0).memory
    assert held(record.ledger) == written(tmp_path) == {}
    assert len(memory) == 1000
    assert (np.cumsum(memory["delta"]) >= 0).all()
    assert len(read_rank(tmp_path, 0).ops) == 500


def test_several_threads_lose_no_change(tmp_path: Path, record: Recorder) -> None:
    def work() -> None:
        for _ in range(2000):
            tensor = torch.zeros(1)
            record.ledger.track(tensor, "activations")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory = read_rank(tmp_path, 0).memory
    assert len(memory) == 16000
    assert sorted(set(memory["delta"])) == [-4, 4]
    assert held(record.ledger) == written(tmp_path) == {}


def test_a_quiet_ledger_counts_and_writes_nothing_until_it_is_awake(tmp_path: Path, record: Recorder) -> None:
    first, second = torch.zeros(1), torch.zeros(2)
    record.ledger.track(first, "grads")
    record.ledger.be_quiet()
    record.ledger.track(second, "params")
    del first
    assert held(record.ledger) == written(tmp_path) == {"grads": 4}
    record.ledger.be_awake()
    assert held(record.ledger) == written(tmp_path) == {"params": 8}
    assert list(read_rank(tmp_path, 0).memory["delta"]) == [4, -4, 8]  # less first: no peak that never was
