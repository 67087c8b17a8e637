"""Throughput, speed-up and efficiency on more and more ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import mpkit as mk
from mpkit.data import spirals
from mpkit.models import MLP

Clusters = Callable[[int], mk.Cluster]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def model() -> MLP:
    torch.manual_seed(0)
    return MLP(2, 3, width=64, layers=3)


def test_strong_scaling_keeps_the_batch(clusters: Clusters) -> None:
    found = mk.scaling(
        model(), spirals(240, 2), [1, 2, 4], loss=F.cross_entropy, optimizer=sgd, clusters=clusters
    )
    assert [row.ranks for row in found.rows] == [1, 2, 4]
    assert [row.batch for row in found.rows] == [240] * 3
    one, *more = found.rows
    assert (one.speed_up, one.efficiency, one.exposed, one.wall_time) == (1.0, 1.0, 0.0, None)
    for row in more:
        assert row.throughput == row.batch / row.step_time
        assert row.speed_up == pytest.approx(one.step_time / row.step_time)
        assert row.efficiency == pytest.approx(row.speed_up / row.ranks)
        assert row.exposed >= 0
    table = found.to_dataframe()
    assert table["strategy"].tolist() == ["serial", "DDP", "DDP"]
    assert table["throughput"].tolist() == [row.throughput for row in found.rows]
    assert str(found).startswith("strong scaling: 240 samples per batch")
    assert len(str(found).splitlines()) == 6


def test_on_other_hardware_it_is_what_the_costs_say(clusters: Clusters) -> None:
    """On a link of infinite speed strong scaling is ideal, but for what does not shrink with the batch."""
    free = mk.devices.Hardware(
        "free",
        mk.devices.Device("toy", {"float32": 1e6}, bandwidth=1e15),
        mk.devices.Link("none", 0.0, 1e15),
        per_node=8,
    )
    plans = [mk.Plan.serial(), mk.Plan.ddp(2), mk.Plan.zero(2, 2)]
    found = mk.scaling(
        model(), spirals(64, 2), plans, loss=F.cross_entropy, optimizer=sgd, hardware=free, clusters=clusters
    )
    assert found.hardware == "free"
    for row in found.rows[1:]:
        assert row.efficiency == pytest.approx(1.0, abs=0.01)
    figure = found.figure()
    names = [trace.name for trace in figure.data]
    assert names == ["ideal", "DDP", "ZeRO-2"]
    ideal, ddp, _ = figure.data
    assert list(ideal.y) == [found.rows[0].throughput, 2 * found.rows[0].throughput]
    assert list(ddp.x) == [1, 2]  # serial training is the beginning of each line
    assert "free" in figure.layout.title.text
