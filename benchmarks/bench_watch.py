"""What watching costs: a DDP step of some 10 ms, and a collective.

Watched and unwatched runs alternate, in fresh processes with the same seed; a row is the median of the pairs' ratios.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpkit as mk

RANKS, PAIRS, STEPS, WARM_UP, CALLS = 2, 11, 60, 10, 400
WIDTH, BLOCKS, BATCH = 192, 8, 64


class Block(nn.Module):
    """A block of a transformer's size, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the block computes."""
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def measure() -> list[dict[str, Any]]:
    """Measure both."""
    with mk.Cluster(RANKS, device="cpu") as cluster:
        steps = [[max(cluster.run(_ddp_step, watch=watch)) for watch in (True, False)] for _ in range(PAIRS)]
        ms = statistics.median(plain for _, plain in steps) * 1e3
    with mk.Cluster(1, device="cpu") as cluster:
        calls = [
            [cluster.run(_cpu_of_a_call, watch=watch)[0] for watch in (True, False)] for _ in range(PAIRS)
        ]
    return [
        _row(f"watch: a DDP step, {RANKS} ranks", steps, f"of the same unwatched: {ms:.3g} ms"),
        {
            "name": "watch: CPU of an all_reduce and its wait, 1 rank",
            "value": statistics.median(watched - plain for watched, plain in calls) * 1e6,
            "unit": "us more",
            "ratio": None,
            "against": f"than unwatched: {statistics.median(plain for _, plain in calls) * 1e6:.3g} us",
        },
    ]


def _row(name: str, pairs: list[list[float]], against: str) -> dict[str, Any]:
    return {
        "name": name,
        "value": statistics.median(watched for watched, _ in pairs),
        "unit": "s",
        "ratio": statistics.median(watched / plain for watched, plain in pairs),
        "against": against,
    }


def _ddp_step(ctx: mk.Context) -> float:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[Block() for _ in range(BLOCKS)]), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH)
    times = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def _cpu_of_a_call(ctx: mk.Context) -> float:
    data = torch.ones(1)
    best = float("inf")
    for _ in range(8):
        start = time.process_time()
        for _ in range(CALLS):
            dist.all_reduce(data)
        best = min(best, (time.process_time() - start) / CALLS)
    return best
