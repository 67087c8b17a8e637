"""A profile: what is measured of a model once, and what it says of plans that have not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import mpkit as mk
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
