"""Several ranks: numbers, absent ones, clocks of several hosts, groups of a mesh; in files as NCCL's runs have them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit.timeline.foreign.open_trace import OpenedTrace
from mpkit.trace import Kind
from tests.kineto.program import Program
from tests.serial import Clusters

STEP, KERNEL = 10_000.0, 400.0  # us


def on_gpu(name: str, start: float, length: float, stream: int, **args: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": stream, **args}
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": length,
        "args": args,
    }  # fmt: skip


def reduce(at: float, ranks: list[int], name: str, desc: str, elements: int, took: float) -> dict[str, Any]:
    """What a kernel of an all-reduce has in a file."""
    return on_gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at, took, 20, **{
        "Collective name": "allreduce", "dtype": "Float", "In msg nelems": elements, "Out msg nelems": elements,
        "Group size": len(ranks), "Process Group Name": name, "Process Group Description": desc,
        "Process Group Ranks": str(ranks),
    })  # fmt: skip


def file_of(
    path: Path, rank: int, world: int, *, tp: list[int], dp: list[int], offset: float = 0.0, host: str = ""
) -> None:
    """Write three steps: a forward with an all-reduce among tp, a backward, and one among dp; times in us."""
    program = Program(rank, world, host_name=host)
    del program.header["distributedInfo"]["pg_config"]
    for step in range(3):
        at = 1e6 + offset + STEP * step
        program.annotation(f"ProfilerStep#{step}", at, STEP - 10)
        program.annotation("forward", at + 100.0, 2000.0)
        program.annotation("backward", at + 3000.0, 2000.0)
        program.annotation("Optimizer.step#AdamW.step", at + 7000.0, 600.0)
        for number, start in enumerate((200.0, 1600.0, 3100.0, 4000.0, 7100.0)):
            ids = {"correlation": 100 * step + number, "External id": 100 * step + number}
            program.span("cuda_runtime", "cudaLaunchKernel", at + start - 50.0, 5.0, **ids)
            program.events.append(on_gpu("gemm", at + start, KERNEL, 7, **ids))
        program.events += [
            reduce(at + 650.0 + 10 * rank, tp, "1", "mesh_tp", 4096, 900.0 - 10 * rank),
            reduce(at + 2050.0, tp, "1", "mesh_tp", 4096, 300.0),
            reduce(at + 4500.0 + 10 * rank, dp, "2", "mesh_dp", 1 << 20, 1500.0 - 10 * rank),
        ]
    path.write_text(json.dumps(program.json()))


def mesh_of_four(folder: Path, ranks: tuple[int, ...] = (0, 1, 2, 3), late: float = 0.0) -> Path:
    for rank in ranks:
        tp = [0, 1] if rank < 2 else [2, 3]
        dp = [0, 2] if rank % 2 == 0 else [1, 3]
        path, host = folder / f"worker_{3 - rank}.json", f"node{rank // 2}"
        file_of(path, rank, 4, tp=tp, dp=dp, offset=late * (rank > 1), host=host)
    return folder


def test_ranks_are_the_files_own_and_groups_lie_along_the_mesh(tmp_path: Path) -> None:
    trace = mk.open(mesh_of_four(tmp_path))
    assert trace.meta["imported"]["ranks"] == [0, 1, 2, 3]
    assert trace.meta["axes"] == {"0,1": "tp", "2,3": "tp", "0,2": "dp", "1,3": "dp"}
    assert trace.inferred.plan == mk.Plan(dp=2, tp=2)
    timeline = trace.timeline()
    assert timeline.mesh is not None
    assert [*timeline.comm_matrix().by_axis] == ["dp", "tp"]
    assert timeline.comm_bytes[0] == {"all_reduce": 4 * (1 << 20) + 2 * 4 * 4096}


def test_clocks_of_hosts_are_aligned_by_the_ends_of_collectives(tmp_path: Path) -> None:
    trace = mk.open(mesh_of_four(tmp_path, late=3_000_000.0))
    clocks = trace.meta["imported"]["clocks"]
    assert [round(clock["offset"] / 1e3) for clock in clocks] == [0, 0, -3_000_000, -3_000_000]
    assert any("put on that of rank 0 by the ends of" in note for note in trace.notes)
    assert trace.timeline().step_time < 0.1


def test_other_hardware_takes_what_its_links_take(tmp_path: Path) -> None:
    trace = mk.open(mesh_of_four(tmp_path))
    fast, slow = trace.timeline("8x-h100-nvlink"), trace.timeline("8x-h100-pcie")
    assert fast.step_time < slow.step_time
    assert not any("Not finished" in note for note in [*fast.notes, *slow.notes])


def test_waits_are_for_what_ended_last(tmp_path: Path) -> None:
    trace = mk.open(mesh_of_four(tmp_path))
    spans = trace.timeline().spans
    waits = spans[
        (spans["kind"] == Kind.WAIT) & (spans["rank"] == 0) & (spans["cause"] >= 0) & (spans["step"] == 1)
    ]
    assert {Kind(int(kind)) for kind in spans["kind"][waits["cause"]]} == {Kind.ALL_REDUCE}
    longest = waits[int((waits["end"] - waits["start"]).argmax())]
    assert longest["end"] - longest["start"] == pytest.approx(1500e-6, rel=0.01)


# ---- Programs that torch.profiler and mpkit record at the same time: both tell the same, and the plan comes back.

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
    assert imported.steps == [1, 2] and "not shown" not in " ".join(imported.notes)
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
    assert "sends among 2 ranks, which no library names" in str(opened.inferred)
    agree(opened, own)
    assert "imported" in str(mk.compare(imported=opened, own=own))
