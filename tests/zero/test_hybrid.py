"""Hybrid sharding: ZeRO within groups of replicas. tests/mesh/test_pairs.py has it with everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.trace import Kind
from tests.recipes import adamw
from tests.serial import Train

Clusters = Callable[[int], mk.Cluster]
ZERO = pytest.mark.parametrize("zero", [1, 3])


def chain(width: int = 8, layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).double()


def batch(width: int = 8, samples: int = 8) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(samples, width).double(), torch.randn(samples, width).double())]


# ---- in a training -----------------------------------------------------------------------------------------------


@ZERO
def test_a_rank_holds_its_part_of_a_group_and_sums_it_over_the_groups(train: Train, zero: int) -> None:
    """Of psi parameters in float64: 2 psi of states and gradients, a half each; the sum of a half over 2 groups."""
    plan = mk.Plan(dp=4, zero=zero, dp_shard=2, bucket_mb=0.0005, microbatches=2)
    run = train(chain(), batch(), plan, loss=F.mse_loss, optimizer=adamw, steps=3)
    timeline, psi = run.timeline(), 4 * (64 + 8)
    for held in timeline.peak_memory:
        assert held["optimizer"] == 2 * 8 * psi / 2
        assert held["params"] == 8 * psi / (2 if zero == 3 else 1)
        assert zero < 2 or held["grads"] == 8 * psi / 2
    spans = timeline.spans[timeline.spans["step"] == timeline.steps[-1]]
    for rank in range(4):
        mine = spans[spans["rank"] == rank]
        over_groups = mine[(mine["kind"] == Kind.ALL_REDUCE)]
        assert {timeline.names[group] for group in over_groups["group"]} == {
            ",".join(map(str, plan.mesh.group(rank, "dp_replicate")))
        }
        assert over_groups["bytes"].sum() == 8 * psi / 2, "once per step, not per micro-batch"
        backwards = mine[(mine["kind"] == Kind.BACKWARD) & (mine["depth"] == 0)]
        begun = over_groups["issued"] < backwards["end"].max()
        assert begun.any() and (over_groups["issued"] > backwards["start"].max()).all(), (
            "beside the last backward"
        )


# ---- the plan ----------------------------------------------------------------------------------------------------


def test_changes_of_a_plan_keep_its_groups(clusters: Clusters) -> None:
    """What would fit and what-if change degrees that groups depend on."""
    big = mk.fits(
        "llama3-70b", mk.Plan(dp=32, zero=3, dp_shard=8, precision="bf16"), "4x8-a100-hdr", sequence=1024
    )
    assert "dp_shard=None" in str(big)
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": adamw}
    run = clusters(4).train(chain(), batch(), mk.Plan(dp=4, zero=3, dp_shard=2), steps=3, **how).wait()
    assert run.what_if(ranks=8).plan == mk.Plan(dp=8, zero=3, dp_shard=2)
    assert run.what_if(zero=0).plan == mk.Plan(dp=4)
    assert run.what_if(dp_shard=None).plan == mk.Plan(dp=4, zero=3)
    assert run.timeline().diagnose() is not None
