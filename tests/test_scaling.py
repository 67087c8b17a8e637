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
