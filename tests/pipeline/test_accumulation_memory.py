"""Accumulated gradients: a micro-batch's activations are let go of before the next one's are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.plan.schedule import NAMES
from mpkit.plan.schedule.catalogue import has_pairs
from tests.mesh.test_mesh_training import tokens
from tests.recipes import adamw
from tests.serial import Train

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

HOW: dict[str, Any] = {"loss": next_token_loss, "optimizer": adamw, "steps": 2}
M = 4
PLANS = [
    mk.Plan(),
    mk.Plan.ddp(2),
    mk.Plan.zero(3, 2),
    mk.Plan(tp=2, sequence_parallel=True, schedule="1f1b"),
    mk.Plan(cp=2),
]


def gpt() -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT(vocab=32, layers=3, width=16, heads=2, length=24)


ONE_STAGE = [name for name in NAMES if mk.Plan(schedule=name).stages == 1 and not has_pairs(name)]
"""Not that of pairs, whose forwards run with the backward of the micro-batch before."""


@pytest.mark.parametrize("name", ONE_STAGE)
def test_with_one_stage_every_schedule_goes_back_before_the_next_micro_batch(name: str) -> None:
    assert str(mk.Plan(schedule=name, microbatches=3).build()) == "rank 0 | F0 B0 -- F1 B1 -- F2 B2 --"


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_four_micro_batches_hold_the_activations_of_one(
    train: Train, clusters: Callable[[int], mk.Cluster], plan: mk.Plan
) -> None:
    """Real and played, beside a training on a quarter of the samples."""
    data = tokens(8, 24, 32)
    quarter = [(x[: 8 // M], y[: 8 // M]) for x, y in data]
    many = replace(plan, microbatches=M)
    alone = train(gpt(), quarter, plan, **HOW).timeline().peak_memory
    whole = train(gpt(), data, many, **HOW).timeline().peak_memory
    trace = mk.trace_fake(gpt, many, batch=data[0], cluster=clusters(1), **HOW)
    played = mk.Timeline.of(trace).peak_memory
    for held in (whole, played):
        more = [rank["activations"] - one["activations"] for rank, one in zip(held, alone, strict=True)]
        assert all(0 <= extra <= 4 * M for extra in more), more  # the losses so far
