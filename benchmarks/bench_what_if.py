"""Changes of a run as `Run.what_if` predicts them, beside runs of the changed plans: step time on the virtual clock.

Each round trains the plan, asks what a change would do, and trains the changed plan at once, since a machine's speed
drifts; medians over rounds are shown. Four ranks on two cores are compared too: on the virtual clock each has a core of
its own. `link=` and `overlap=` replay the run's own records and have no run to be compared with.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch

import mpkit as mk
from mpkit.models import GPT, next_token_loss

STEPS, BATCH, LENGTH, ROUNDS = 8, 32, 64, 3
WITHIN = 0.1
CHANGES: tuple[tuple[mk.Plan, Mapping[str, Any]], ...] = (
    (mk.Plan.gpipe(2, 4), {"microbatches": 16}),
    (mk.Plan.gpipe(2, 16), {"microbatches": 4}),
    (mk.Plan.gpipe(2, 8), {"schedule": "1f1b"}),
    (mk.Plan.pipeline("1f1b", 2, 8), {"schedule": "zb_h1"}),
    (mk.Plan.pipeline("zb_h1", 2, 8), {"schedule": "interleaved_1f1b"}),
    (mk.Plan.gpipe(2, 8, cut=[2]), {"cut": "balanced"}),
    (mk.Plan.pipeline("1f1b", 2, 8), {"ranks": 4}),
    (mk.Plan.ddp(2), {"ranks": 4}),
    (mk.Plan.ddp(2, bucket_mb=1), {"bucket_mb": 25}),
    (mk.Plan.zero(1, 2), {"zero": 3}),
    (mk.Plan.gpipe(2, 8), {"recompute": "full"}),
    (mk.Plan.gpipe(2, 8, recompute="full"), {"recompute": "none"}),
)


def measure() -> list[dict[str, Any]]:
    """Measure each change, and how many were predicted within 10 %."""
    torch.manual_seed(0)
    model = GPT(layers=8, width=192, heads=4, length=LENGTH)
    tokens = torch.randint(0, 256, (BATCH, LENGTH + 1))
    data = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    pairs: list[list[tuple[float, float]]] = [[] for _ in CHANGES]
    with mk.Cluster(2, device="cpu") as cluster:
        for _ in range(ROUNDS):
            for found, (plan, change) in zip(pairs, CHANGES, strict=True):
                asked = _run(cluster, model, data, plan).what_if(**change)
                found.append((asked.step_time, _typical(_run(cluster, model, data, asked.plan))))
    rows = [_row(plan, change, found) for (plan, change), found in zip(CHANGES, pairs, strict=True)]
    within = sum(abs(row["ratio"] - 1) <= WITHIN for row in rows)
    return [
        *rows,
        {"name": f"what if: within {WITHIN:.0%} of the run", "value": within, "unit": f"of {len(rows)}"},
    ]


def _run(cluster: mk.Cluster, model: torch.nn.Module, data: Any, plan: mk.Plan) -> Any:
    return (
        cluster.resized(plan.ranks)
        .train(model, data, plan, loss=next_token_loss, optimizer=_adamw, steps=STEPS, show=False)
        .wait()
    )


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)


def _typical(run: Any) -> float:
    timeline = run.timeline(clock="virtual")
    return statistics.median(timeline.step(number).step_time for number in timeline.steps[1:])


def _row(plan: mk.Plan, change: Mapping[str, Any], pairs: list[tuple[float, float]]) -> dict[str, Any]:
    words = ", ".join(f"{name}={value}" for name, value in change.items())
    took = statistics.median(took for _, took in pairs)
    return {
        "name": f"what if {words}: {plan!r}",
        "value": statistics.median(predicted for predicted, _ in pairs),
        "unit": "s",
        "ratio": statistics.median(predicted / took for predicted, took in pairs),
        "against": f"of the changed plan's run: {took * 1e3:.3g} ms",
    }
