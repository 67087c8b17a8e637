"""The timeline of real ranks, on a clock that counts FLOPs, is the one that the simulation predicts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from tests.counted import counted
from tests.recipes import sgd

LOOPS = ("looped_bfs", "interleaved_1f1b", "interleaved_zb")


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
def test_the_bubble_of_each_step_is_that_of_the_simulation(
    clusters: Callable[[int], mk.Cluster], name: str
) -> None:
    """Two linear layers per stage: its inputs' gradients take time in each stage, the first one too."""
    plan = mk.Plan(pp=4, schedule=name, microbatches=8, virtual_stages=2 if name in LOOPS else 1)
    layers = [
        layer for _ in range(plan.stages) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    ]
    data = [(torch.ones(8, 16), torch.zeros(8, 16))]
    plan = mk.Plan(
        pp=4, schedule=name, microbatches=8, virtual_stages=plan.virtual_stages,
        cut=list(range(3, len(layers), 3)),
    )  # fmt: skip
    run = clusters(4).train(nn.Sequential(*layers), data, plan, loss=F.mse_loss, optimizer=sgd, steps=3)
    ran = counted(run.wait().trace)
    simulated = mk.simulate(plan, **ran.stage_times(), steps=3)
    bubbles = [ran.bubble_of(step) for step in ran.steps]
    assert bubbles == pytest.approx([simulated.bubble_of(step) for step in range(3)], abs=1e-6)
    assert ran.step_time == pytest.approx(simulated.step_time, rel=1e-6)
