"""The Python that `plan.to("fsdp")` writes runs on real ranks, and trains as one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit import Plan

STEPS, SAMPLES = 3, 8


class Blocks(nn.Module):
    """Blocks in a ModuleList, as models have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 2, generator=generator)


def serial() -> list[float]:
    model = Blocks()
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(ctx: Any, code: str) -> list[float]:
    """Train with `shard` and `step` of the code that was written."""
    written: dict[str, Any] = {}
    exec(code, written)
    model = Blocks()
    model = written["shard"](model, model.blocks)
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for step in range(STEPS):
        mine = [part.chunk(2)[ctx.rank] for part in batch(step)]
        losses.append(written["step"](model, optimizer, nn.functional.mse_loss, mine).item())
    return losses


@pytest.mark.parametrize(
    "plan",
    [Plan.zero(3, 2), Plan.zero(2, 2, microbatches=2), Plan.zero(3, 2, recompute="full", offload="params")],
    ids=str,
)
def test_the_code_trains_as_one_process(plan: Plan, clusters: Callable[..., mk.Cluster]) -> None:
    ranks = clusters(2).run(trained, str(plan.to("fsdp")))
    assert [sum(step) / 2 for step in zip(*ranks, strict=True)] == pytest.approx(serial(), rel=1e-5)
