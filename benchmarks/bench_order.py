"""The order of all plans for 4 and 8 CPU ranks: predicted from a profile of this machine, then run.

A small GPT of eight layers under every mesh, stage of ZeRO and schedule; on 8 ranks under a sample of them, which has
each mesh equally often and is drawn with a fixed seed. The value is the rank correlation of predicted and measured step
times on the virtual clock, where each rank has a core of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import chain, zip_longest
from random import Random
from typing import Any

import torch

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.prediction.advice.try_out import PlanTrials, every_plan, try_plans

PLANS = {4: None, 8: 40}
"""Plans to run by ranks; None: all. Of 8 ranks there are 161 plans, of which each takes some seconds on two cores."""
SEED = 0
LAYERS, WIDTH, HEADS, BATCH, LENGTH, MICROBATCHES = 8, 96, 8, 32, 64, 4


def measure() -> list[dict[str, Any]]:
    """Measure each number of ranks."""
    torch.manual_seed(0)
    model = GPT(layers=LAYERS, width=WIDTH, heads=HEADS, length=LENGTH)
    tokens = torch.randint(0, 256, (BATCH, LENGTH + 1))
    data = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    rows = []
    for ranks, count in PLANS.items():
        plans = list(every_plan(ranks, MICROBATCHES))
        chosen = sample(plans, count) if count else plans
        with mk.Cluster(ranks, device="cpu") as cluster:
            profile = mk.profile(model, data, loss=next_token_loss, optimizer=_adamw, cluster=cluster)
            tried = try_plans(profile, chosen, cluster)
            print(tried)
        rows.append(_row(ranks, tried, len(plans)))
    return rows


def sample(plans: Sequence[mk.Plan], count: int) -> list[mk.Plan]:
    """Return so many of the plans: by turns one of each mesh, in an order that the seed decides."""
    draw = Random(SEED)
    of_mesh: dict[object, list[mk.Plan]] = {}
    for plan in draw.sample(plans, len(plans)):
        of_mesh.setdefault(plan.mesh, []).append(plan)
    turns = chain.from_iterable(zip_longest(*of_mesh.values()))
    return [plan for plan in turns if plan is not None][:count]


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)


def _row(ranks: int, tried: PlanTrials, possible: int) -> dict[str, Any]:
    ratios = [guess / ran for guess, ran in zip(tried.predicted, tried.ran, strict=True)]
    return {
        "name": f"order: {len(tried.plans)} of {possible} plans on {ranks} ranks",
        "value": tried.rank_correlation,
        "unit": "",
        "ratio": statistics.median(ratios),
        "against": f"predicted / measured, from {min(ratios):.2f} to {max(ratios):.2f}",
    }
