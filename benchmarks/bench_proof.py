"""What the proof of a run costs, and which of its steps it covers: 50 steps with verify="first" and with verify=False.

Both sides are whole runs, from `train` to the end of `wait`, in pairs whose order alternates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.data import text_batches
from mpkit.models import GPT, MLP, next_token_loss

ROUNDS, STEPS = 5, 50


def _points() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(0)
    return [(torch.randn(64, 64, generator=made), torch.randn(64, 8, generator=made)) for _ in range(STEPS)]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any, mk.Plan]] = {
    "MLP, DDP": (lambda: MLP(64, 8, width=256, layers=6), _points, nn.functional.mse_loss, mk.Plan.ddp(2)),
    "GPT with dropout, ZeRO-3": (
        lambda: GPT(layers=4, width=128, dropout=0.1),
        lambda: text_batches(batch=16, length=64, steps=STEPS),
        next_token_loss,
        mk.Plan.zero(3, 2),
    ),
    "GPT, GPipe": (
        lambda: GPT(layers=4, width=128),
        lambda: text_batches(batch=16, length=64, steps=STEPS),
        next_token_loss,
        mk.Plan.gpipe(2, 4),
    ),
}


def measure() -> list[dict[str, Any]]:
    """Measure each case."""
    rows = []
    with mk.Cluster(ranks=2, device="cpu") as cluster:
        for name, (make, data, loss, plan) in CASES.items():
            torch.manual_seed(0)
            model, batches, steps = make(), data(), 0
            times: dict[Any, list[float]] = {"first": [], False: []}
            for number in range(ROUNDS + 1):
                for verify in sorted(times, key=bool, reverse=bool(number % 2)):
                    began = time.perf_counter()
                    run = cluster.train(
                        model,
                        batches,
                        plan,
                        loss=loss,
                        optimizer=torch.optim.AdamW,
                        steps=STEPS,
                        verify=verify,
                    ).wait()
                    times[verify].append(time.perf_counter() - began)
                    steps = max(steps, len(run.proof.steps))
            ours, theirs = times["first"][1:], times[False][1:]
            rows.append(
                {
                    "name": f"proof: {name}, {steps} of {STEPS} steps verified",
                    "value": statistics.median(ours),
                    "unit": "s",
                    "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
                    "against": f"of verify=False: {statistics.median(theirs):.3g} s",
                }
            )
    return rows
