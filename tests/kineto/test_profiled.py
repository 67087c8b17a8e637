"""Programs that torch.profiler and mpkit record at the same time: both tell the same, and the plan comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import mpkit as mk
from mpkit.timeline.foreign.open_trace import OpenedTrace
from mpkit.trace import Kind

Clusters = Callable[[int], mk.Cluster]

STEPS = 3  # the first one is not profiled


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))


def profiled(rank: int, folder: Path, model: nn.Module, step: Callable[[], None]) -> None:
    """Train, and leave a file of torch.profiler's."""
    from torch.profiler import ProfilerActivity, profile, schedule

    optimizer = torch.optim.AdamW(model.parameters())
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True,
        schedule=schedule(wait=0, warmup=1, active=STEPS - 1, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(folder / f"rank{rank}.json")),
    ) as profiler:  # fmt: skip
        for _ in range(STEPS):
            step()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


def ddp(ctx: Any, folder: Path) -> None:
    model = nn.parallel.DistributedDataParallel(layers(), bucket_cap_mb=0.05)
    profiled(ctx.rank, folder, model, lambda: model(torch.randn(8, 32)).square().mean().backward())


def fsdp(ctx: Any, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = layers()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    profiled(ctx.rank, folder, model, lambda: model(torch.randn(8, 32)).square().mean().backward())


def pipeline(ctx: Any, folder: Path) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    layer = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    stage = PipelineStage(layer, ctx.rank, 4, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)

    def step() -> None:
        first, last = ctx.rank == 0, ctx.rank == 3
        schedule.step(*[torch.randn(16, 32)] * first, **({"target": torch.randn(16, 32)} if last else {}))

    profiled(ctx.rank, folder, layer, step)


def both(cluster: mk.Cluster, program: Callable[..., Any], folder: Path) -> tuple[OpenedTrace, mk.Timeline]:
    """What torch.profiler and mpkit recorded of the same run."""
    cluster.run(lambda ctx: program(ctx, folder), watch=True)
    return mk.open(folder), cluster.timeline(clock="measured")


def actions(timeline: mk.Timeline, step: int, rank: int) -> list[Kind]:
    """Return the kinds of a rank's actions, in order of their starts."""
    spans = np.sort(timeline.spans, order="start")
    chosen = spans[(spans["step"] == step) & (spans["rank"] == rank) & (spans["depth"] == 0)]
    return [
        Kind(kind)
        for kind in chosen["kind"].tolist()
        if kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)
    ]


def agree(opened: OpenedTrace, own: mk.Timeline) -> None:
    """The last step is the same in both: actions in order, communications and their payloads."""
    imported = opened.timeline()
    assert imported.steps == [1, 2]
    assert imported.world_size == own.world_size
    for rank in range(own.world_size):
        assert actions(imported, 2, rank) == actions(own, 2, rank)
    assert imported.comm_bytes == own.comm_bytes


def test_ddp(clusters: Clusters, tmp_path: Path) -> None:
    opened, own = both(clusters(2), ddp, tmp_path)
    assert opened.inferred.plan == mk.Plan.ddp(2)
    assert "DistributedDataParallel.forward is called once per step" in opened.inferred.evidence[-1]
    agree(opened, own)
    assert opened.timeline().comm_matrix().bytes.sum() > 0
    assert opened.timeline().peak_memory[0]["total"] > 0


def test_fsdp2(clusters: Clusters, tmp_path: Path) -> None:
    opened, own = both(clusters(2), fsdp, tmp_path)
    assert opened.inferred.plan == mk.Plan(dp=2, zero=3)
    assert "gathers 3 groups of parameters (0, 2, 4)" in opened.inferred.evidence[0]
    agree(opened, own)


def test_a_pipeline_of_four_ranks(clusters: Clusters, tmp_path: Path) -> None:
    opened, own = both(clusters(4), pipeline, tmp_path)
    assert opened.inferred.plan is None  # torch's 1F1B announces nothing
    assert "which no library names: it fits stages of a pipeline" in str(opened.inferred)
    agree(opened, own)
    assert "imported" in str(mk.compare(imported=opened, own=own))
