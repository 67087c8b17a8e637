"""A dataset in batches: who takes which samples, that none is lost or doubled, and that it trains the same."""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import mpkit as mk
from mpkit.strategies.data.microbatch import share
from mpkit.strategies.prepare import batches as reading
from mpkit.timeline.idleness import CAUSES, idle_by_cause
from mpkit.trace import Kind
from tests.limits import wait_for, wait_until_gone
from tests.recipes import sgd
from tests.serial import Clusters, Train, serial

NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of no bytes


def points(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(n)
    inputs = torch.randn(n, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.randn(n, 2, dtype=torch.float64, generator=generator))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 2)
    ).double()


HOW: dict[str, Any] = {
    "loss": F.mse_loss,
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


def plainly(model: nn.Module, batches: mk.Batches, steps: int, **how: Any) -> tuple[list[float], Any]:
    """Losses and weights of plain PyTorch, which reads each batch by its number."""
    return serial(model, [batches[step] for step in range(steps)], steps=steps, **HOW | how)


@given(
    samples=st.integers(1, 40), batch=st.integers(1, 12), n=st.integers(1, 5), seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=60)
def test_every_sample_is_taken_once_an_epoch(samples: int, batch: int, n: int, seed: int, epoch: int) -> None:
    batches = mk.Batches(points(samples), batch, seed=seed)
    steps = range(epoch * len(batches), (epoch + 1) * len(batches))
    taken: list[list[int]] = [[] for _ in range(n)]
    for step in steps:
        indices = batches.indices(step)
        assert len(indices) == batches.size(step)
        for rank in range(n):
            if rank < len(indices):
                taken[rank] += indices[share(0, len(indices), rank, n)]
    assert sorted(i for one in taken for i in one) == list(range(samples))
    if batch % n == 0:  # then they are torch's, which pads at the end what we do not
        for rank in range(n):
            sampler = DistributedSampler(range(samples), n, rank, shuffle=True, seed=seed)
            sampler.set_epoch(epoch)
            theirs = list(sampler)
            assert len(theirs) - len(taken[rank]) <= 1
            assert theirs[: len(taken[rank])] == taken[rank]


PLANS = [
    mk.Plan.serial(),
    mk.Plan.ddp(5),  # the last batch has 3 samples: two ranks take none
    mk.Plan.gpipe(3, 3),
]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_training_equals_serial_training_and_the_digests_prove_the_shares(
    clusters: Clusters, plan: mk.Plan
) -> None:
    dataset = points(13)
    batches = mk.Batches(dataset, 5, seed=4)
    steps = 2 * len(batches)
    losses, weights = plainly(net(), batches, steps)
    run = clusters(plan.ranks).train(net(), batches, plan, steps=steps, **HOW).wait()
    assert run.losses == pytest.approx(losses, rel=1e-8)
    torch.testing.assert_close(run.state_dict(), weights, rtol=1e-8, atol=1e-10)

    # Each epoch every sample was taken once: by content, not by claim.
    assert len(run.data_digest) == len(run.samples_seen) == steps
    every = Counter(mk.data.sample_digests(*dataset[:]))
    holders = [0, plan.pp - 1] if plan.pp > 1 else range(plan.dp)
    for epoch in range(2):
        seen = run.samples_seen[epoch * len(batches) : (epoch + 1) * len(batches)]
        if plan.pp > 1:  # both ends take the whole batch, the middle nothing
            assert all(ranks[0] == ranks[-1] for ranks in seen)
            assert Counter(digest for ranks in seen for digest in ranks[0]) == every
        else:
            assert Counter(digest for ranks in seen for one in ranks for digest in one) == every
    # And a share's digest can be computed by whoever knows the rule.
    if plan.microbatches == 1:
        for step, by_rank in enumerate(run.data_digest):
            inputs, targets = batches[step]
            for rank in holders:
                assert by_rank[rank] == mk.data.data_digest(inputs[rank :: plan.dp], targets[rank :: plan.dp])
    for rank in set(range(plan.ranks)) - set(holders):
        assert {by_rank[rank] for by_rank in run.data_digest} == {NOTHING}


def test_a_digest_tells_values_shapes_and_dtypes_apart() -> None:
    x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])
    same = mk.data.data_digest(x, y)
    assert same == mk.data.data_digest(x.clone(), y.numpy()) == mk.data.data_digest(x.t().contiguous().t(), y)
    others = [
        mk.data.data_digest(x.double(), y), mk.data.data_digest(x.reshape(3, 1, 2), y),
        mk.data.data_digest((x,), y.int()), mk.data.data_digest({"x": x}, y), mk.data.data_digest(-x, y),
        mk.data.data_digest(x.flip(0), y), mk.data.data_digest(x.bfloat16(), y), mk.data.data_digest(x > 2, y),
    ]  # fmt: skip
    assert len({same, *others}) == 9
    assert mk.data.data_digest(x[:0], y[:0]) == NOTHING
    assert len(set(mk.data.sample_digests(x, y))) == 3
    assert mk.data.data_digest(torch.zeros(2, 0), torch.zeros(2)) != mk.data.data_digest(
        torch.zeros(3, 0), torch.zeros(3)
    )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Endless(Dataset[Any]):
    def __getitem__(self, i: int) -> Any:
        return torch.zeros(1), 0


@pytest.mark.parametrize(("make", "said"), [
    (lambda: mk.Batches(torch.zeros(3, 2), 2), r"TensorDataset\(inputs, targets\)"),
    (lambda: mk.Batches(DataLoader(points(3)), 2), "data=loader"),
    (lambda: mk.Batches(Stream(), 2), "map-style"),
    (lambda: mk.Batches(Endless(), 2), r"no len\(\)"),
    (lambda: mk.Batches([], 2), "no samples"),
    (lambda: mk.Batches(points(3), 0), "batch_size=0"),
    (lambda: mk.Batches(points(3), True), "batch_size=True"),
    (lambda: mk.Batches(points(3), 2, seed=-1), "seed=-1"),
    (lambda: mk.Batches(points(3), 4, drop_last=True), "batch_size=3 makes one"),
    (lambda: mk.Batches(points(3), 2)[-1], "step=-1"),
    (lambda: mk.Batches([torch.zeros(2)] * 3, 2)[0], "not a pair"),
    (lambda: mk.Batches([("a", 1)] * 3, 2)[0], "the inputs of a sample are tuple: a tensor"),
    (lambda: mk.Batches([(torch.zeros(i), 1) for i in (1, 2)], 2)[0], "do not go into one batch"),
])  # fmt: skip
def test_a_dataset_that_makes_no_batches_says_so(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_what_cannot_be_shared_out_is_refused_before_anything_starts(clusters: Clusters) -> None:
    with pytest.raises(ValueError, match="drop_last=True"):
        clusters(2).train(net(), mk.Batches(points(9), 4), mk.Plan.gpipe(2, 2), steps=3, **HOW)
    normed = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).double()
    with pytest.raises(ValueError, match=r"some rank has no sample.*batchnorm='local'"):
        clusters(4).train(normed, mk.Batches(points(10), 8), mk.Plan.ddp(4), steps=2, **HOW)


class Computed(Dataset[Any]):
    """Samples that take some time to make; each says which process made it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        sum(range(20_000))
        return points(12)[i]


@pytest.mark.slow
def test_workers_load_what_the_rank_would_and_the_wait_is_on_the_timeline(
    clusters: Clusters, tmp_path: Path
) -> None:
    for plan in (mk.Plan.ddp(2, microbatches=2), mk.Plan.dp(2), mk.Plan.gpipe(2, 2)):
        losses = {}
        for workers in (0, 2):
            data = mk.Batches(Computed(), batch_size=4, num_workers=workers)
            run = clusters(2).train(net(), data, plan, steps=4, **HOW).wait()
            losses[workers] = list(run.losses)
            for clock in ("virtual", "measured"):
                t = run.timeline(clock=clock)
                assert all(0 < data < t.step_time for data in t.data_time)
                assert t.idle == pytest.approx([t.step_time - busy for busy in t.busy])
            spans = t.spans[t.spans["kind"] == Kind.DATA]
            assert sorted(spans["step"].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert losses[0] == losses[2] == pytest.approx(plainly(net(), data, 4)[0], rel=1e-12)
    causes = dict(zip(CAUSES, idle_by_cause(run.timeline()).sum(axis=0), strict=True))
    assert causes["data"] > 0 and sum(causes.values()) == pytest.approx(sum(run.timeline().idle))
    assert "data loading" in str(t) and "data 0" in str(t) and "data loading" in t.to_svg()
    assert set(t.to_dataframe()["lane"]) >= {"compute", "data"}
    assert any(event["cat"] == "data" for event in _events(t.to_perfetto(tmp_path / "trace.json")))
    run.trace.save(tmp_path / "run.mpk")
    assert mk.Timeline.of(mk.Trace.load(tmp_path / "run.mpk"), clock="measured").data_time == t.data_time
    replayed = run.timeline("2x-rtx-4090")
    assert replayed.data_time == pytest.approx(run.timeline().data_time), (
        "another GPU does not read data faster"
    )


def _events(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if "cat" in event]


def test_workers_end_with_their_rank(clusters: Clusters) -> None:
    data = mk.Batches(Computed(), batch_size=4, num_workers=1)
    run = clusters(2).train(net(), data, mk.Plan.ddp(2), steps=10**6, **HOW)
    wait_for(lambda: run.done or len(run.losses) >= 2)
    children = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in run.pids]
    workers = [int(pid) for each in children for pid in each]
    assert len(workers) == 2
    os.kill(run.pids[1], signal.SIGKILL)
    with pytest.raises(mk.RankFailed, match="rank 1 of 2 was killed by SIGKILL"):
        run.wait()
    wait_until_gone(workers)


def test_a_loader_that_gives_one_ranks_share_is_refused(clusters: Clusters) -> None:
    class Shares(DataLoader[Any]):
        num_processes = 4

    sampler = DistributedSampler(points(8), num_replicas=2, rank=0)  # type: ignore[var-annotated]
    for data in (
        DataLoader(points(8), batch_size=2, sampler=sampler),
        DataLoader(points(8), batch_sampler=torch.utils.data.BatchSampler(sampler, 2, False)),
        Shares(points(8), batch_size=2),
    ):
        with pytest.raises(ValueError, match=r"gives one rank's share.*mk.Batches\(dataset, batch_size\)"):
            clusters(2).train(net(), data, mk.Plan.ddp(2), **HOW)
    alone = DistributedSampler(points(8), num_replicas=1, rank=0)  # type: ignore[var-annotated]
    run = clusters(1).train(net(), DataLoader(points(8), batch_size=8, sampler=alone), **HOW).wait()
    assert "What the DataLoader gave was read before the start" in " ".join(run.timeline().notes), (
        "its time is not passed over"
    )


# ---- Data that come one batch after the other: read before the start, and trained on as a list would be.

Batch = tuple[Tensor, Tensor]
STREAMED: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd}


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def one_by_one(count: int) -> Iterator[Batch]:
    torch.manual_seed(0)
    for _ in range(count):
        yield torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)


class Samples(IterableDataset[Batch]):
    """Twelve samples, one by one."""

    def __iter__(self) -> Iterator[Batch]:
        return ((x, y) for batch in one_by_one(3) for x, y in zip(*batch, strict=True))


def test_a_generator_and_an_iterable_dataset_train_as_a_list_does(clusters: Clusters) -> None:
    losses = []
    for data in (list(one_by_one(3)), one_by_one(99), DataLoader(Samples(), batch_size=4)):
        run = clusters(2).train(small_net(), data, mk.Plan.ddp(2), steps=3, **STREAMED).wait()
        assert run.proof.status == "equal"
        losses.append((run.losses, run.data_digest))
    assert losses[0] == losses[1] == losses[2]


def test_too_few_batches_and_too_many_bytes_are_rejected(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"the data ended after 4 batches, and 9 steps take 9: steps=4"):
        clusters(2).train(small_net(), one_by_one(4), mk.Plan.ddp(2), steps=9, **STREAMED)
    with pytest.raises(ValueError, match="data is empty"):
        clusters(2).train(small_net(), iter([]), mk.Plan.ddp(2), **STREAMED)
    monkeypatch.setattr(reading, "MOST_READ", 2**14)
    with pytest.raises(ValueError, match=r"5 of 1,000,000 batches .* mk\.Batches\(dataset, batch_size\)"):
        clusters(2).train(small_net(), one_by_one(10**6), mk.Plan.ddp(2), steps=10**6, **STREAMED)


# ---- Datasets that change their samples at random give the same ones on any ranks and workers, and others each time.

SAMPLES, BATCH = 12, 6


class Transform:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, x: Tensor) -> Tensor:
        return x + float(self.generator.random())


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Adds one number of each generator to a sample; the target knows which."""

    def __init__(self) -> None:
        self.transforms = [Transform()]
        self.torch, self.python = torch.Generator(), random.Random(0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        drawn = [
            torch.rand(()).item(), torch.rand((), generator=self.torch).item(), random.random(),
            self.python.random(), np.random.rand(),
        ]  # fmt: skip
        x = self.transforms[0](torch.tensor(drawn, dtype=torch.float64))
        return x, x.sum()[None]


def test_a_sample_draws_the_same_whoever_reads_it_and_others_each_time() -> None:
    batches = mk.Batches(Noisy(), BATCH)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = batches[0][0]
    assert torch.equal(first[1::2], batches.part(0, slice(1, None, 2))[0])
    drawn = torch.cat([batches[step][0] for step in range(4)])
    for column in drawn.T:
        assert column.unique().numel() == 4 * BATCH  # no two samples, and no epochs, draw the same
    assert not torch.equal(first, mk.Batches(Noisy(), BATCH, seed=1)[0][0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.parametrize(
    ("plan", "workers"), [(mk.Plan.ddp(2, microbatches=2), 2), (mk.Plan.gpipe(2, 2), 0)], ids=str
)
def test_augmented_training_equals_a_plain_loop(train: Train, plan: mk.Plan, workers: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    run = train(model, mk.Batches(Noisy(), BATCH, num_workers=workers), plan, steps=5, **STREAMED)
    losses, _ = plainly(model, mk.Batches(Noisy(), BATCH), 5, **STREAMED)
    assert run.losses == pytest.approx(losses, abs=1e-12)
