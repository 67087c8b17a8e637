"""Plans predicted from a profile, beside their runs: step time on the virtual clock and on the measured one.

The model is the demo's, and so are the plans. Each of the two ranks has a core of its own where the machine has two,
so the wall clock counts as well. A machine's speed drifts: every round
profiles, predicts and runs, and medians are shown.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.timeline.timeline import Timeline
from mpkit.views.commands.demo import STRATEGIES

RANKS, MICROBATCHES, STEPS, BATCH, LENGTH = 2, 8, 8, 32, 64
NAMES = ("naive", "gpipe", "1f1b", "zb-h1", "ddp", "zero1", "zero2", "zero3", "tp")
ROUNDS = 3
CLOCKS = ("virtual", "measured")


def measure() -> list[dict[str, Any]]:
    """Measure each plan."""
    torch.manual_seed(0)
    model = GPT(layers=8, width=192, heads=4, length=LENGTH)
    tokens = torch.randint(0, 256, (BATCH, LENGTH + 1))
    data = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with mk.Cluster(RANKS, device="cpu") as cluster:
        for _ in range(ROUNDS):
            _round(model, data, cluster, found)
    return [_row(*of, pairs) for of, pairs in found.items()]


def _round(
    model: torch.nn.Module,
    data: Any,
    cluster: mk.Cluster,
    found: dict[tuple[str, str], list[tuple[float, float]]],
) -> None:
    """Profile, and predict and run each plan, with its (predicted, measured) seconds by title and clock."""
    profile = mk.profile(model, data, loss=next_token_loss, optimizer=_adamw, cluster=cluster)
    for name in NAMES:
        title, plan = STRATEGIES[name](RANKS, MICROBATCHES)
        predicted = {clock: profile.predict(plan, clock=clock, cluster=cluster).step_time for clock in CLOCKS}
        run = cluster.train(
            model, data, plan, loss=next_token_loss, optimizer=_adamw, steps=STEPS, show=False
        ).wait()
        for clock in CLOCKS:
            found.setdefault((title, clock), []).append(
                (predicted[clock], _median(run.timeline(clock=clock)))
            )


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)


def _median(timeline: Timeline) -> float:
    return statistics.median(timeline.step(i).step_time for i in timeline.steps[1:])


def _row(title: str, clock: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    took = statistics.median(took for _, took in pairs)
    return {
        "name": f"predicted: {title}, {RANKS} ranks",
        "value": statistics.median(predicted for predicted, _ in pairs),
        "unit": "s",
        "ratio": statistics.median(predicted / took for predicted, took in pairs),
        "against": f"of its {clock} step: {took * 1e3:.3g} ms",
    }
