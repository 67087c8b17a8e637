"""The order of all plans for 4 and 8 CPU ranks: predicted from a profile of this machine, then run.

A small GPT of eight layers under every mesh, stage of ZeRO and schedule. The value is the rank correlation of predicted
and measured step times on the virtual clock, where each rank has a core of its own.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import mpkit as mk
from mpkit.advice.try_out import Tried, every_plan, try_plans
from mpkit.models import GPT, next_token_loss

RANKS = 4, 8
LAYERS, WIDTH, HEADS, BATCH, LENGTH, MICROBATCHES = 8, 96, 8, 32, 64, 4


def measure() -> list[dict[str, Any]]:
    """Measure each number of ranks."""
    torch.manual_seed(0)
    model = GPT(layers=LAYERS, width=WIDTH, heads=HEADS, length=LENGTH)
    tokens = torch.randint(0, 256, (BATCH, LENGTH + 1))
    data = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    rows = []
    for ranks in RANKS:
        with mk.Cluster(ranks, device="cpu") as cluster:
            profile = mk.profile(model, data, loss=next_token_loss, optimizer=_adamw, cluster=cluster)
            tried = try_plans(profile, list(every_plan(ranks, MICROBATCHES)), cluster)
            print(tried)
        rows.append(_row(ranks, tried))
    return rows


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)


def _row(ranks: int, tried: Tried) -> dict[str, Any]:
    ratios = [guess / ran for guess, ran in zip(tried.predicted, tried.ran, strict=True)]
    return {
        "name": f"order: {len(tried.plans)} plans on {ranks} ranks",
        "value": tried.rank_correlation,
        "unit": "",
        "ratio": statistics.median(ratios),
        "against": f"predicted / measured, from {min(ratios):.2f} to {max(ratios):.2f}",
    }
