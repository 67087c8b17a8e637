"""The references that train: equal to serial training, and what the plan of the same name sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.reference import (
    bucketed_ddp,
    dp,
    flat_ddp,
    hybrid_shards,
    naive_ddp,
    zero1,
    zero2,
    zero3,
)
from mpkit.strategies.reference import stage as pipeline
from mpkit.strategies.reference.gpipe import gpipe
from mpkit.strategies.reference.naive_model_parallelism import naive_model_parallelism
from mpkit.strategies.reference.one_f_one_b import one_f_one_b
from mpkit.trace import Kind, Trace
from tests.recipes import adamw
from tests.serial import serial

Clusters = Callable[[int], mk.Cluster]

STEPS, B, LOSS = 3, 8, 8
"""Steps; samples; bytes of the loss, which a plan's last stage sends to its first, for the live view."""


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()


def batches(into: int = 6, out: int = 4) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(B, into).double(), torch.randn(B, out).double()) for _ in range(STEPS)]


def in_buckets(ctx: mk.Context, model: nn.Module, *how: Any) -> list[float]:
    """Bucketed DDP, with two buckets."""
    backwards = list(model.parameters())[::-1]
    return bucketed_ddp.train(ctx, model, *how, buckets=[backwards[:3], backwards[3:]])


def in_pairs(ctx: mk.Context, model: nn.Module, *how: Any) -> list[float]:
    """Hybrid shards, of which two ranks share each."""
    return hybrid_shards.train(ctx, model, *how, s=2)


def sent(trace: Trace) -> Counter[tuple[str, int]]:
    """How often rank 0 communicates per step, by kind and payload, but for the loss; of a plan in its last step."""
    ops = trace.ranks[0].ops
    ops = ops[(ops["kind"] >= Kind.SEND) & (ops["kind"] < Kind.COPY_TO_DEVICE) & (ops["bytes"] > LOSS)]
    last, steps = ops["step"].max(), STEPS
    if last >= 0:
        ops, steps = ops[ops["step"] == last], 1
    counted = Counter((Kind(op["kind"]).name, int(op["bytes"])) for op in ops)
    assert not any(times % steps for times in counted.values())
    return Counter({what: times // steps for what, times in counted.items()})


def payload(counted: Counter[tuple[str, int]]) -> Counter[str]:
    """Bytes by kind."""
    found: Counter[str] = Counter()
    for (kind, nbytes), times in counted.items():
        found[kind] += nbytes * times
    return found


def planned(cluster: mk.Cluster, model: nn.Module, plan: mk.Plan) -> Counter[tuple[str, int]]:
    """What the plan sends."""
    how: Any = {"loss": F.mse_loss, "optimizer": adamw, "steps": STEPS}
    return sent(cluster.train(model, batches(), plan, **how).wait().trace)


@pytest.mark.parametrize(("train", "plan"), [
    (dp.train, mk.Plan.dp(2)),
    (naive_ddp.train, mk.Plan.ddp(2)),
    (flat_ddp.train, mk.Plan.ddp(2)),
    (in_buckets, mk.Plan.ddp(2, bucket_mb=0.0005)),
    (zero1.train, mk.Plan.zero(1, 2)),
    (zero2.train, mk.Plan.zero(2, 2)),
    (zero3.train, mk.Plan.zero(3, 2)),
    (in_pairs, mk.Plan.zero(2, 4, dp_shard=2)),
])  # fmt: skip
def test_data_parallel(clusters: Clusters, train: Callable[..., list[float]], plan: mk.Plan) -> None:
    cluster, model = clusters(plan.ranks), mlp()
    expected, _ = serial(model, batches(), loss=F.mse_loss, optimizer=adamw, steps=STEPS)
    found = cluster.run(train, model, batches(), F.mse_loss, adamw)
    counted = sent(cluster.trace)
    losses = found[0] if train is dp.train else [mean(parts) for parts in zip(*found, strict=True)]
    assert losses == pytest.approx(expected, rel=1e-12)
    by_plan = planned(cluster, model, plan)
    assert payload(counted) == payload(by_plan)
    if train is flat_ddp.train:
        assert counted == by_plan


@pytest.mark.parametrize("ranks", [4])
@pytest.mark.parametrize(("schedule", "name", "m"), [
    (naive_model_parallelism, "naive", 1), (gpipe, "gpipe", 4), (one_f_one_b, "1f1b", 4),
])  # fmt: skip
def test_pipelines(clusters: Clusters, schedule: Any, name: str, m: int, ranks: int) -> None:
    cluster, model = clusters(ranks), mlp()
    expected, _ = serial(model, batches(), loss=F.mse_loss, optimizer=adamw, steps=STEPS)
    cuts = [0, 2, 4, 6, 7] if ranks == 4 else [0, 4, 7]
    stages = [model[a:b] for a, b in pairwise(cuts)]
    found = cluster.run(pipeline.train, schedule, stages, batches(), F.mse_loss, adamw, (B // m, 8), m)
    counted = sent(cluster.trace)
    assert found[-1] == pytest.approx(expected, rel=1e-12)
    plan = mk.Plan(pp=ranks, schedule=name, microbatches=m, cut=tuple(str(i) for i in cuts[1:-1]))
    assert counted == planned(cluster, model, plan)


def test_a_rank_of_1f1b_holds_what_is_under_way(clusters: Clusters) -> None:
    """Of 8 micro-batches rank s holds p - s at most; GPipe holds all."""

    def most(ctx: mk.Context, schedule: Any, stages: Any, given: Any) -> int:
        held, most = 0, 0

        def count(*_: Any) -> None:
            nonlocal held, most
            held += 1
            most = max(held, most)

        def release(*_: Any) -> None:
            nonlocal held
            held -= 1

        stage = stages[ctx.rank]
        stage.register_forward_hook(count)
        stage[0].weight.register_post_accumulate_grad_hook(release)
        pipeline.train(ctx, schedule, stages, given, F.mse_loss, adamw, boundary=(1, 8), m=8)
        return most

    model = mlp()
    stages = [model[a:b] for a, b in pairwise([0, 2, 4, 6, 7])]
    assert clusters(4).run(most, one_f_one_b, stages, batches()) == [4, 3, 2, 1]
    assert clusters(4).run(most, gpipe, stages, batches()) == [8, 8, 8, 8]
