"""A profile: what is measured of a model once, and what it says of plans that have not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import mpkit as mk
from mpkit.common.this_process import cores
from mpkit.prediction.experiments.played_training import PlayedTraining
from mpkit.prediction.experiments.profile import Profile
from mpkit.trace import Kind
from tests.recipes import adamw

HOW: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": adamw}
BATCH = torch.zeros(16, 8), torch.zeros(16, dtype=torch.long)
KINDS = [Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD]
SECONDS = dict(
    zip(KINDS, ({4: 4.0, 8: 6.0, 16: 10.0}, {8: 16.0}, {8: 3.0, 4: 3.0}, {4: 5.0}, {4: 1.0}), strict=True)
)


def about(time: float) -> Any:
    """Return a time that each played operator may exceed by a nanosecond, since no two events coincide."""
    return pytest.approx(time, rel=2e-3)


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return mk.models.MLP(8, 4, width=32, layers=3)


@pytest.fixture(scope="module")
def found(clusters: Callable[[int], mk.Cluster]) -> Profile:
    return mk.profile(mlp(), [BATCH], cluster=clusters(2), **HOW)


@pytest.fixture(scope="module")
def said(found: Profile) -> Profile:
    """A profile whose seconds are ours, so that what it says of a plan can be computed by hand."""
    return replace(found, measured=SECONDS, beside={}, busy=replace(found.busy, issue={}), start=0.0)


def times(timeline: mk.Timeline, kind: Kind) -> float:
    """Return the seconds of a kind, of the mean rank."""
    mine = timeline.spans[(timeline.spans["kind"] == kind) & (timeline.spans["depth"] == 0)]
    return float((mine["end"] - mine["start"]).sum()) / len(set(timeline.spans["rank"].tolist()))


def test_each_kind_is_measured_at_several_sizes(found: Profile) -> None:
    assert {kind: sorted(sizes) for kind, sizes in found.measured.items()} == {
        Kind.FORWARD: [1, 2, 8],
        Kind.BACKWARD: [1, 2, 8],
        Kind.OPTIMIZER: [1, 2, 8],
        Kind.INPUT_GRAD: [1, 2],
        Kind.WEIGHT_GRAD: [1, 2],
    }
    assert all(time > 0 for sizes in found.measured.values() for time in sizes.values())
    assert found.samples == 16
    assert not found.whole
    assert "forward      1: " in str(found)
    assert "weight grad  1: " in str(found)


def test_serial_training_takes_what_was_measured(
    said: Profile, clusters: Callable[[int], mk.Cluster]
) -> None:
    alone = said.predict(mk.Plan.serial(), cluster=clusters(2))
    assert times(alone, Kind.FORWARD) == about(10)
    assert times(alone, Kind.BACKWARD) == about(32)  # of 8 samples: 16
    assert times(alone, Kind.OPTIMIZER) == about(3)
    quarters = said.predict(mk.Plan.serial(4), cluster=clusters(2))
    assert times(quarters, Kind.FORWARD) == about(4 * 4)


def test_replicas_take_what_their_share_of_the_samples_takes(
    said: Profile, clusters: Callable[[int], mk.Cluster]
) -> None:
    """Of both ranks, though the second one's records are the first one's."""
    predicted = said.predict(mk.Plan.ddp(2), cluster=clusters(2))
    assert times(predicted, Kind.FORWARD) == about(6)
    assert times(predicted, Kind.OPTIMIZER) == about(3)
    assert predicted.step_time > 6 + 16 + 3  # communication


def test_ranks_that_compute_at_once_slow_each_other_down(
    said: Profile, clusters: Callable[[int], mk.Cluster]
) -> None:
    """All of the time under data parallelism; never where one rank waits for the other."""
    slowed = replace(said, beside={Kind.FORWARD: 2.0, Kind.BACKWARD: 1.5})
    apart, both = (one.predict(mk.Plan.ddp(2), cluster=clusters(2)) for one in (said, slowed))
    for kind, factor in ((Kind.FORWARD, 2.0), (Kind.BACKWARD, 1.5), (Kind.OPTIMIZER, 1.0)):
        assert times(both, kind) == about(factor * times(apart, kind))
    in_turn = mk.Plan(pp=2, schedule="naive")
    alone, beside = (one.predict(in_turn, cluster=clusters(2)) for one in (said, slowed))
    assert times(beside, Kind.FORWARD) == about(times(alone, Kind.FORWARD))


def test_the_measured_clock_has_the_links_of_busy_ranks(
    said: Profile, clusters: Callable[[int], mk.Cluster]
) -> None:
    """Each of tensor parallelism's all-reduces takes two hops, and at most one of them hides behind compute."""
    slow = replace(said.busy.link, latency=1.0, bandwidth=inf, bus={})
    plan, cluster = mk.Plan(tp=2), clusters(2)
    alone = said.predict(plan, cluster=cluster)
    reduced = alone.spans[(alone.spans["kind"] == Kind.ALL_REDUCE) & (alone.spans["rank"] == 0)]
    busy = replace(said, busy=replace(said.busy, link=slow, taken=0.0)).predict(
        plan, clock="measured", cluster=cluster
    )
    assert len(reduced) > 2
    assert 2 * len(reduced) - 2.1 < busy.step_time - alone.step_time < 2 * len(reduced) + 0.1


def test_hidden_communication_takes_a_core(said: Profile, clusters: Callable[[int], mk.Cluster]) -> None:
    plan, cluster = mk.Plan.ddp(4), clusters(2)  # more ranks than this machine has cores, or as many
    slow = replace(said.busy.link, latency=1.0, bandwidth=inf, bus={})
    free, paid = (
        replace(said, busy=replace(said.busy, link=slow, taken=taken)).predict(
            plan, clock="measured", cluster=cluster
        )
        for taken in (0.0, 0.5)
    )
    if plan.ranks >= cores():
        assert times(paid, Kind.BACKWARD) > times(free, Kind.BACKWARD)
        assert times(paid, Kind.OPTIMIZER) == about(times(free, Kind.OPTIMIZER))
    else:
        assert times(paid, Kind.BACKWARD) == about(times(free, Kind.BACKWARD))


def test_what_is_measured_between_busy_ranks(found: Profile) -> None:
    assert set(found.beside) == set(KINDS)
    assert all(factor >= 1 for factor in found.beside.values())
    assert found.busy.link.latency > 0
    assert found.busy.taken > 0
    assert set(found.busy.issue) == {Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.SEND}
    assert all(call > 0 and each >= 0 for call, each in found.busy.issue.values())
    assert found.start >= 0
    assert "between two busy ranks a message waits" in str(found)


def test_starting_operators_does_not_shrink_with_what_they_work_on(
    said: Profile, clusters: Callable[[int], mk.Cluster]
) -> None:
    """Where nothing but starting them takes time, half of each operator takes as long as the whole."""
    starts = {size: 6.0 for size in (4, 8, 16)}
    only = replace(said, start=1.0, measured={**SECONDS, Kind.FORWARD: starts})
    whole, halves = (only.predict(plan, cluster=clusters(2)) for plan in (mk.Plan.serial(), mk.Plan(tp=2)))
    assert times(halves, Kind.FORWARD) > 0.9 * times(whole, Kind.FORWARD)
    no_start = replace(only, start=0.0).predict(mk.Plan(tp=2), cluster=clusters(2))
    assert times(no_start, Kind.FORWARD) < 0.8 * times(whole, Kind.FORWARD)


def test_each_call_within_an_action_takes_its_time(
    said: Profile, clusters: Callable[[int], mk.Cluster]
) -> None:
    slow = replace(said, busy=replace(said.busy, issue={Kind.ALL_REDUCE: (1.0, 0.0)}))
    plan = mk.Plan(tp=2)
    free, paid = (one.predict(plan, cluster=clusters(2)) for one in (said, slow))
    calls = free.spans[(free.spans["kind"] == Kind.ALL_REDUCE) & (free.spans["rank"] == 0)]
    longer = sum(times(paid, kind) - times(free, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
    assert longer == pytest.approx(len(calls), abs=1.01)


def test_a_clock_that_there_is_not(said: Profile) -> None:
    with pytest.raises(ValueError, match=r"clock='wall': .*clock='virtual' or clock='measured'"):
        said.predict(mk.Plan.ddp(2), clock="wall")


def test_stages_share_what_the_model_takes(said: Profile, clusters: Callable[[int], mk.Cluster]) -> None:
    predicted = said.predict(mk.Plan.gpipe(2, 4), cluster=clusters(2))
    assert times(predicted, Kind.FORWARD) == about(4 * 4 / 2)
    assert times(predicted, Kind.OPTIMIZER) == about(3 / 2)


def test_a_split_backward_takes_what_its_halves_take(
    said: Profile, clusters: Callable[[int], mk.Cluster]
) -> None:
    predicted = said.predict(mk.Plan(pp=2, schedule="zb_h1", microbatches=4), cluster=clusters(2))
    assert times(predicted, Kind.INPUT_GRAD) == about(4 * 5 / 2)
    assert (
        3 / 2 < times(predicted, Kind.WEIGHT_GRAD) < 4 / 2
    )  # the first one's gradients are not added to others


def test_a_model_of_one_stage_has_no_split_backward(clusters: Callable[[int], mk.Cluster]) -> None:
    found = mk.profile(torch.nn.Linear(8, 4), BATCH, cluster=clusters(2), **HOW)
    assert found.whole
    assert Kind.INPUT_GRAD not in found.measured
    assert found.predict(mk.Plan.ddp(2), cluster=clusters(2)).step_time > 0
    plan = mk.Plan(pp=2, schedule="zb_h1", microbatches=4)
    with pytest.raises(ValueError, match=r"stage"):
        found.predict(plan, cluster=clusters(2))
    with pytest.raises(ValueError, match=r"splits the backward.*1f1b"):
        replace(found, _played=_SplitAnyway(clusters(2))).predict(plan)


class _SplitAnyway(PlayedTraining):
    """Plays another model, whose backward can be split."""

    def __init__(self, cluster: mk.Cluster) -> None:
        super().__init__(mlp(), BATCH, **HOW)
        self._cluster = cluster

    def trace(self, plan: mk.Plan, **options: Any) -> mk.Trace:
        return super().trace(plan, **options | {"cluster": self._cluster})


@pytest.mark.parametrize("data", [(), [], 3, [BATCH[0]]], ids=["nothing", "no batch", "a number", "inputs"])
def test_data_that_are_no_batch(data: Any) -> None:
    with pytest.raises(ValueError, match=r"give a batch, \(inputs, targets\)"):
        mk.profile(mlp(), data, **HOW)
