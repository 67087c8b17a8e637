"""The data-parallel family beside PyTorch's own, step by step in the same processes.

    DDP            beside torch's DistributedDataParallel
    ZeRO-1         beside DistributedDataParallel with ZeroRedundancyOptimizer
    ZeRO-2, -3     beside FSDP2's fully_shard of every block, which keeps gathered parameters until the backward (2), or
                   gathers them again (3)
    hybrid         ZeRO-3 within groups of two ranks, beside fully_shard on a mesh of two axes

On each rank both sides train a GPT with 11 M parameters, alternating step by step, with all ranks starting
together; a pair's ratio is that of the slowest rank's times. mpkit records all the while, the other side does
not. Each side's peak memory is measured as `benchmarks.pairing` says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mpkit as mk
from benchmarks.pairing import Step, compared, compared_peaks, pairs, peak_memory
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training

ROUNDS, WARM_UP = 15, 3
LENGTH, BATCH = 64, 8


def model() -> nn.Module:
    """Build a GPT with 11 M parameters."""
    torch.manual_seed(0)
    return GPT(layers=6, width=384, heads=6, length=LENGTH)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Build the optimizer that both sides use."""
    return torch.optim.AdamW(params, lr=1e-4)


PLANS = {
    "DDP": lambda n: mk.Plan.ddp(n),
    "ZeRO-1": lambda n: mk.Plan.zero(1, n),
    "ZeRO-2": lambda n: mk.Plan.zero(2, n),
    "ZeRO-3": lambda n: mk.Plan.zero(3, n),
    "hybrid": lambda n: mk.Plan.zero(3, n, dp_shard=2),
}
THEIRS = {
    "DDP": "torch's DistributedDataParallel",
    "ZeRO-1": "torch's ZeroRedundancyOptimizer",
    "ZeRO-2": "FSDP2, reshard_after_forward=False",
    "ZeRO-3": "FSDP2, reshard_after_forward=True",
    "hybrid": "FSDP2 on a mesh of two axes",
}


# ---------------------------------------------------------------- one side on one rank


def ours(ctx: Any, name: str) -> Step:
    """Return a function that runs one training step with mpkit."""
    return trained(ctx, prepared(ctx, name))


def prepared(ctx: Any, name: str) -> TrainJob:
    """Prepare a training, which a caller's process does and a rank does not."""
    job = prepare(
        model(), text_batches(BATCH, LENGTH, 4), PLANS[name](ctx.world_size),
        loss=next_token_loss, optimizer=adamw, steps=1000, ranks=ctx.world_size,
    )  # fmt: skip
    return job.with_model(nn.Module())  # so that the memory of the prepared model is freed


def trained(ctx: Any, job: TrainJob) -> Step:
    """Return a function that runs one training step of a job, on a model that is made here as theirs is."""
    return Training(ctx, job.with_model(model())).step


def theirs(ctx: Any, name: str) -> Step:
    """Return a function that runs one training step with PyTorch alone."""
    net, optimizer = _theirs(name)
    batches = [
        (x[ctx.rank :: ctx.world_size], y[ctx.rank :: ctx.world_size])
        for x, y in text_batches(BATCH, LENGTH, 4)
    ]

    def step(number: int) -> None:
        inputs, targets = batches[number % len(batches)]
        optimizer.zero_grad()
        loss = next_token_loss(net(inputs), targets)
        loss.backward()
        loss.item()
        optimizer.step()

    return step


def _theirs(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    if name in ("DDP", "ZeRO-1"):
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
        if name == "DDP":
            return net, adamw(net.parameters())
        return net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-4)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    n, again = dist.get_world_size(), name != "ZeRO-2"
    mesh = (
        init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("replicate", "shard"))
        if name == "hybrid"
        else init_device_mesh("cpu", (n,))
    )
    for block in net.children():
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh, reshard_after_forward=again)
    fully_shard(net, mesh=mesh, reshard_after_forward=again)
    return net, adamw(net.parameters())


# ---------------------------------------------------------------- measuring


def both(ctx: Any, name: str) -> list[tuple[float, float]]:
    """Return the seconds of a step of ours and of theirs, one pair per round."""
    return pairs(ours(ctx, name), theirs(ctx, name), ROUNDS, WARM_UP)


def peak(ctx: Any, name: str, side: str) -> int:
    """Return the most bytes that the allocator held on this rank."""
    if side == "theirs":
        return peak_memory(lambda: theirs(ctx, name))
    job = prepared(ctx, name)
    return peak_memory(lambda: trained(ctx, job))


def measure() -> Iterator[dict[str, Any]]:
    """Yield the rows of the table; those of the pairs that are named on the command line, if any is."""
    chosen = [name for name in PLANS if name in sys.argv] or list(PLANS)
    for ranks in (2, 4):
        with mk.Cluster(ranks, device="cpu") as cluster:
            for name in chosen:
                if name == "hybrid" and ranks == 2:
                    continue  # two ranks are one group
                title = f"data parallel: a step of {name} on {ranks} ranks"
                yield compared(title, THEIRS[name], cluster.run(both, name))
                title = f"data parallel: peak memory of {name} on {ranks} ranks"
                yield compared_peaks(title, THEIRS[name], cluster, peak, name)
