"""The guide's example of operator parallelism: mean and standard deviation on two ranks at the same time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from examples.flexflow import mean_and_std_at_once

Clusters = Callable[[int], mk.Cluster]


@pytest.mark.parametrize(
    "layer",
    [
        None,
        nn.LayerNorm(24, eps=0.1),
        nn.LayerNorm(24, bias=False),
        nn.LayerNorm(24, elementwise_affine=False),
    ],
)
def test_equal_to_torchs_layer_norm(clusters: Clusters, layer: nn.LayerNorm | None) -> None:
    x = 3 + 2 * torch.randn(5, 7, 24, dtype=torch.float64)
    found = mean_and_std_at_once(x, layer, cluster=clusters(2))
    assert found.difference < 1e-12
    if layer is not None:
        weight, bias = (None if p is None else p.detach().double() for p in (layer.weight, layer.bias))
        for y in found.outputs:
            torch.testing.assert_close(
                y, F.layer_norm(x, (24,), weight, bias, layer.eps), rtol=1e-10, atol=1e-10
            )


def test_both_at_the_same_time(clusters: Clusters) -> None:
    """On the timeline rank 0 computes σ while rank 1 computes μ; then they exchange both."""
    x = torch.randn(64, 128, 256, dtype=torch.float64)
    found = mean_and_std_at_once(x, cluster=clusters(2))
    frame = found.timeline.to_dataframe()
    spans = {
        (row["rank"], row["name"]): (row["start"], row["end"])
        for _, row in frame[frame["lane"] == "compute"].iterrows()
    }
    std, mean = spans[0, "std"], spans[1, "mean"]
    assert (0, "mean") not in spans and (1, "std") not in spans
    assert max(mean[0], std[0]) < min(mean[1], std[1])
    gathers = frame[frame["kind"] == "all_gather"]
    assert len(gathers) == 2 and gathers["end"].min() >= max(mean[1], std[1])
    assert all(spans[rank, "normalize"][0] >= gathers["end"].min() for rank in (0, 1))
    assert gathers["bytes"].tolist() == [2 * 64 * 128 * 8] * 2  # two numbers per row
    assert "F.layer_norm" in str(found)


def test_what_cannot_be_says_so(cluster: mk.Cluster, clusters: Clusters) -> None:
    with pytest.raises(ValueError, match=r"nn\.LayerNorm\(6\) normalizes its last"):
        mean_and_std_at_once(torch.ones(2, 6), nn.LayerNorm(4), cluster=clusters(2))
    with pytest.raises(ValueError, match=r"has 4 ranks.*mk\.Cluster\(ranks=2\)"):
        mean_and_std_at_once(cluster=cluster)
