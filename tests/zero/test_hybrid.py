"""Hybrid sharding: ZeRO within groups of replicas. tests/mesh/test_pairs.py has it with everything else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpkit as mk
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.models.chain import layers_of
from mpkit.strategies.replicas.part import ReplicatedPart, shard_groups
from mpkit.strategies.replicas.zero3 import zero_sync
from mpkit.strategies.stage.stage import Stage
from mpkit.trace import Kind
from tests.recipes import adamw
from tests.serial import EXACT, Train

sys.path.insert(0, str(Path(__file__).parents[1] / "wrap"))

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


# ---- in a loop of one's own --------------------------------------------------------------------------------------


class UsedTwice(nn.Module):
    """A block that is computed again within the backward, and used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.block = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x.tanh(), use_reentrant=False)
        return x


def accumulate(ctx: Any, zero: int) -> dict[str, Tensor]:
    model = UsedTwice()
    plan = mk.Plan(dp=ctx.world_size, zero=zero, dp_shard=2, bucket_mb=0.0001, batchnorm="local")
    axes = MeshAxes(ctx.comm, ctx.device, plan.mesh)
    stages, groups = {0: Stage(0, layers_of(model), ctx.device)}, shard_groups(plan, axes)
    replica = zero_sync(ReplicatedPart(ctx, plan, stages, axes.communicator_of("dp"), groups=groups))
    optimizer = torch.optim.SGD([piece.held for piece in replica.pieces], lr=0.1)
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
    for _ in range(2):
        replica.begin_step()
        for part in (0, 1):
            with replica.backward(
                last=part == 1 or zero > 1
            ):  # of ZeRO-2 and -3 each says that it is the last
                model(x[2 * ctx.rank + part : 2 * ctx.rank + part + 1]).square().sum().backward()
        replica.finish()
        optimizer.step()
        replica.renew()
    with replica.gathered():
        return {name: value.clone() for name, value in model.state_dict().items()}


@ZERO
def test_backwards_after_the_last_reach_all_groups(clusters: Clusters, zero: int) -> None:
    model, x = UsedTwice(), torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    for found in clusters(4).run(accumulate, zero):
        torch.testing.assert_close(found, dict(model.state_dict()), **EXACT)


# ---- the plan ----------------------------------------------------------------------------------------------------


def test_any_two_degrees_determine_the_third() -> None:
    plan = mk.Plan(dp=8, zero=3, dp_shard=4)
    assert plan == mk.Plan(dp=8, zero=3, dp_replicate=2) == mk.Plan(zero=3, dp_shard=4, dp_replicate=2)
    assert plan == mk.Plan.from_json(plan.to_json()) == mk.Plan.zero(3, 8, dp_shard=4)
    assert mk.Plan(dp=4, zero=3, dp_shard=4) == mk.Plan(dp=4, zero=3)
    assert mk.Plan(dp_replicate=4) == mk.Plan(dp=4)
    assert mk.Plan(dp=2, cp=2, zero=3, dp_shard=1).shards == 2


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
