"""What is said before a training starts on GPUs that will not hold it; the GPUs are described."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpkit as mk
from mpkit.data import text_batches
from mpkit.devices.local.choose import DeviceChoice
from mpkit.devices.local.inventory import Inventory, LocalDevice
from mpkit.models import GPT, MLP, next_token_loss
from mpkit.prediction.memory_ahead import memory_at_hand, memory_warning, warn_of_memory
from mpkit.strategies.prepare.prepare import prepare
from tests.recipes import adamw

GIB = 2**30


def gpt() -> GPT:
    with torch.device("meta"):
        return GPT(layers=24, width=2048, heads=16, vocab=32_000, length=1024)  # 1.3 B parameters


def test_a_plan_that_fits_is_not_warned_of() -> None:
    assert memory_warning(gpt(), mk.Plan.zero(3, 8), (8, 1024), 80 * GIB) == ""
    assert memory_warning(gpt(), mk.Plan.zero(3, 8), (8, 1024), 0) == ""  # nothing is known of the device


def test_a_plan_that_does_not_fit_is_told_what_would() -> None:
    said = memory_warning(gpt(), mk.Plan.ddp(8), (8, 1024), 24 * GIB)
    needed = float(said.split("need ")[1].split(" GiB")[0])
    psi = sum(p.numel() for p in gpt().parameters())
    assert needed > 16 * psi / GIB  # 4 of weights, 4 of gradients, 8 of Adam's moments, and activations
    assert "24.0 GiB" in said
    assert "What would fit: Plan(" in said
    assert "batch=8, sequence=1024" in said
    remedy = eval(said.split("What would fit: ")[1].split(" (")[0], {"Plan": mk.Plan})
    assert memory_warning(gpt(), remedy, (8, 1024), 24 * GIB) == ""


def test_16_bits_take_what_16_bits_take() -> None:
    """2 + 2 + 12 bytes per parameter as well, but half the activations."""
    full, narrow = (
        memory_warning(gpt(), mk.Plan.ddp(8, **how), (64, 1024), 24 * GIB)
        for how in ({}, {"precision": "bf16"})
    )
    assert float(narrow.split("need ")[1].split(" GiB")[0]) < float(full.split("need ")[1].split(" GiB")[0])


def test_of_any_other_model_the_states_alone_are_counted() -> None:
    with torch.device("meta"):
        model = MLP(16_384, 16_384, width=16_384, layers=8)
    psi = sum(p.numel() for p in model.parameters())
    said = memory_warning(model, mk.Plan.ddp(4), (8, 16_384), 24 * GIB)
    assert f"at least {16 * psi / GIB:.1f} GiB per rank" in said
    assert "mk.Plan.zero(3, 4)" in said
    assert memory_warning(model, mk.Plan.zero(3, 4), (8, 16_384), 24 * GIB) == ""


@pytest.mark.parametrize(("ranks", "each"), [(1, 80), (2, 24), (3, 24), (4, 12)])
def test_ranks_that_share_a_device_share_its_memory(ranks: int, each: int) -> None:
    assert memory_at_hand([80, 24], DeviceChoice("cuda", (0, 1)), ranks) == each


def test_the_job_of_a_training_is_warned_of_at_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpkit.devices.local import queries

    small = Inventory("cuda", (LocalDevice("a small GPU", memory=2**20),) * 2, fake="2 small GPUs")
    monkeypatch.setattr(queries, "inventory_of", lambda kind: small if kind == "cuda" else None)
    how: dict[str, Any] = {"loss": next_token_loss, "optimizer": adamw, "steps": 1}
    model, data = GPT(layers=2, width=64, heads=2, length=16), text_batches(batch=4, length=16, steps=1)
    job = prepare(model, data, mk.Plan.ddp(2), ranks=2, **how)
    with pytest.warns(
        mk.errors.UnwisePlan, match=r"Plan\(dp=2\) is estimated to need .* GiB on rank 0"
    ) as caught:
        warn_of_memory(job, DeviceChoice("cuda", (0, 1)), 2)
    assert caught[0].filename == __file__
    warn_of_memory(job, DeviceChoice("xpu", (0, 1)), 2)  # of which nothing is known
