"""The ledger counts each storage once, for as long as it lives."""

import gc
import random
import threading
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mpkit as mk
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from mpkit.trace import CATEGORIES, Kind, RankTrace, read_rank
from mpkit.trace.record import recorder as module
from mpkit.trace.record.curve import POINTS, Curve, Segment
from mpkit.trace.record.ledger import Ledger
from mpkit.trace.record.memory import DeviceAllocator, StepMemory
from mpkit.trace.record.recorder import Recorder
from tests.recipes import adamw
from tests.serial import Clusters


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


# ---- On a GPU the ledger is brought up to torch's allocator. No GPU is needed: FakeCuda is told what is allocated.


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


# ---- A step's memory is measured once and then played back: both ways are equal to the byte.

STEPS = 6  # 0, 1 and 4 are measured


def measure_every_step(*_: Any) -> None:
    """As `on_step`, which only ranks call: measure each step from here on."""
    begin_step = StepMemory.begin_step

    def measured(self: StepMemory, key: Any, now: int, *, varies: bool = False) -> None:
        begin_step(self, key, now, varies=True)

    StepMemory.begin_step = measured  # type: ignore[method-assign]


def nothing(*_: Any) -> None:
    pass


def peaks(rank: RankTrace) -> list[tuple[int, ...]]:
    """What each step held when it held most: in all, and by category."""
    memory = rank.memory
    levels = np.zeros((len(memory), len(CATEGORIES)), np.int64)
    levels[np.arange(len(memory)), memory["category"]] = memory["delta"]
    levels = levels.cumsum(axis=0)
    found = []
    for step in rank.ops[rank.ops["kind"] == Kind.STEP]:
        within = levels[(memory["time"] >= step["start"]) & (memory["time"] <= step["end"])]
        totals = within.sum(axis=1)
        found.append((int(totals.max()), *within[totals.argmax()].tolist()))
    return found


def both_ways(
    clusters: Clusters, plan: mk.Plan, model: nn.Module, batches: Any, loss: Any, optimizer: Any
) -> None:
    found = []
    for on_step in (nothing, measure_every_step):
        run = clusters(plan.ranks).train(
            model, batches, plan, loss=loss, optimizer=optimizer, steps=STEPS, on_step=on_step
        )
        run.wait()
        found.append([peaks(rank) for rank in run.trace.ranks])
    assert found[0] == found[1]
    return found[0][0][-1][0]


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=4, width=32, heads=4, length=16)


PLANS = {
    "ddp": mk.Plan.ddp(2, microbatches=2), "zero1": mk.Plan.zero(1, 2), "zero2": mk.Plan.zero(2, 2),
    "zero3": mk.Plan.zero(3, 2), "hsdp": mk.Plan(dp=4, zero=3, dp_shard=2),
    "offload": mk.Plan(dp=2, zero=2, offload="optimizer"), "tp": mk.Plan(tp=2, sequence_parallel=True),
    "cp": mk.Plan(cp=2), "pipeline": mk.Plan(pp=2, microbatches=4, schedule="1f1b"),
    "split": mk.Plan(pp=2, microbatches=4, schedule="zb_h1"),
    "recompute": mk.Plan(dp=2, zero=3, recompute="full"),
}  # fmt: skip


@pytest.mark.slow
def test_played_steps_are_measured_ones_and_stages_of_zero_need_less_and_less(clusters: Clusters) -> None:
    batches, held = text_batches(batch=8, length=16, steps=2), {}
    for name in ("zero2", "zero3"):
        held[name] = both_ways(clusters, PLANS[name], gpt(), batches, next_token_loss, adamw)
    assert held["zero2"] >= held["zero3"]


@pytest.mark.soak
@pytest.mark.parametrize("draw", range(200))
def test_played_steps_are_measured_ones_whatever_the_plan(clusters: Clusters, draw: int) -> None:
    chance = random.Random(draw)
    torch.manual_seed(draw)
    width, heads = chance.choice([(16, 2), (32, 4), (48, 4)])
    model = GPT(layers=chance.choice([4, 6]), width=width, heads=heads, length=16)
    optimizer = chance.choice(
        [adamw, lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, 0.1, 0.9)]
    )
    batches = text_batches(batch=chance.choice([8, 12]), length=16, steps=chance.choice([1, 3]))
    both_ways(clusters, chance.choice(list(PLANS.values())), model, batches, next_token_loss, optimizer)


def train(record: Recorder, widths: list[int]) -> list[bool]:
    """A step for each width: an action that keeps 10 tensors of it, and one that frees them; whether it was played."""
    played = []
    for step, width in enumerate(widths):
        with record.step(step):
            record.begin_memory(width)
            played.append(record.memory.playing)
            op, kept = record.begin(Kind.FORWARD), []
            for _ in range(0 if record.memory.playing else 10):
                kept.append(torch.zeros(width))
                record.ledger.track(kept[-1], "activations")
            record.end(op)
            op = record.begin(Kind.BACKWARD)
            kept.clear()
            record.end(op)
    return played


def test_new_shapes_are_measured_and_known_ones_played(tmp_path: Any) -> None:
    record = Recorder(tmp_path, 0)
    assert train(record, [5, 5, 5, 7, 5, 7, 7]) == [False, False, True, False, False, True, True]
    record.close()
    assert [total for total, *_ in peaks(read_rank(tmp_path, 0))] == [200, 200, 200, 280, 200, 280, 280]


def test_another_action_than_the_known_one_is_measured(tmp_path: Any) -> None:
    record = Recorder(tmp_path, 0)
    train(record, [5, 5, 5])
    kept = torch.zeros(3)
    with record.step(3):
        record.begin_memory(5)
        assert record.memory.playing
        op = record.begin(Kind.COMPUTE, "something else")
        record.ledger.track(kept, "activations")
        record.end(op)
        assert not record.memory.playing
    assert record.ledger.held["activations"] == 12
    assert train(record, [5]) == [False]


def test_a_long_segment_keeps_its_peak_and_its_end() -> None:
    changes = [(1, 10 + i, i % 2, 1 + i if i < 600 else -500) for i in range(900)]
    curve = Curve({}, [Segment.measured(None, changes, 1, [10, 1000])])
    curve.play(5, 0, 5, 100)
    values, sums = curve.take(lambda first, count: [])
    records = np.array(values).reshape(-1, 4)
    levels, wanted = records[:, 3].cumsum(), np.cumsum([change[3] for change in changes])
    assert len(records) <= POINTS
    assert (levels.max(), levels[-1], sum(sums.values())) == (wanted.max(), wanted[-1], wanted[-1])
    assert (np.diff(records[:, 0]) >= 0).all()


def test_a_segment_is_put_on_the_times_of_its_ops_now() -> None:
    """Two ops inside, measured and played; then one; then three."""
    changes = [(3, 105, 0, 1), (4, 120, 0, 2), (5, 150, 0, 4), (5, 200, 0, 8)]
    curve = Curve({}, [Segment.measured(None, changes, 3, [100, 110, 140, 200])] * 3)
    starts = {7: 2000, 8: 3000, 9: 6000, 10: 10000, 11: 11000, 12: 12000}
    for place in ((7, 1000, 9, 5000), (9, 5000, 10, 9000), (10, 9000, 13, 13000)):
        curve.play(*place)
    values, _ = curve.take(lambda first, count: [starts[first + i] for i in range(count)])
    assert values[1::4] == [7, 8, 9, 9, 9, 10, 10, 10, 10, 11, 12, 12]
    assert values[::4] == [1500, 2333, 3333, 5000, 5500, 7000, 9000, 9000, 9500, 10333, 11333, 13000]
