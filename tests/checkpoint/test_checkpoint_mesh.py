"""Checkpoints on a mesh: what any one wrote, any other goes on from, as if training had never stopped."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from tests.serial import EXACT, same, serial

Train = Callable[..., Any]

LENGTH = 6


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def gpt(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    # three heads: two ranks share them unevenly
    return GPT(layers=2, width=18, heads=3, length=LENGTH, dropout=dropout).double()


def how(**more: Any) -> dict[str, Any]:
    data = text_batches(6, LENGTH, 5)
    return {"model": gpt(), "data": data, "loss": next_token_loss, "optimizer": adamw, **more}


def any_mesh(chance: random.Random) -> mk.Plan:
    """A plan of 2 to 8 ranks."""
    degrees = [d for d in product((1, 2), (1, 2, 3), (1, 2), (1, 2, 3)) if 1 < prod(d) <= 8]
    pp, dp, cp, tp = chance.choice(degrees)
    return mk.Plan(
        pp=pp,
        dp=dp,
        cp=cp,
        tp=tp,
        zero=chance.choice([0] if dp * cp == 1 else [0, 1] if pp > 1 else [0, 1, 2, 3]),
        schedule="1f1b" if pp > 1 else "naive",
        microbatches=2,
        bucket_mb=0.002,
        sequence_parallel=tp > 1 and cp == 1 and chance.random() < 0.5,
    )


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 7))
def test_any_mesh_goes_on_from_any_other(train: Train, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    before, after = any_mesh(chance), any_mesh(chance)
    first = train(plan=before, steps=2, checkpoint_every=2, checkpoint_dir=tmp_path, **how())
    # ---- what is there, to the bit
    there = train(plan=after, steps=2, resume_from=tmp_path, **how())
    assert there.losses == []
    torch.testing.assert_close(there.state_dict(), first.state_dict(), rtol=0, atol=0)
    # ---- and on
    rest = train(plan=after, steps=4, resume_from=tmp_path, **how())
    losses, weights = serial(**how(), steps=4)
    same(rest, losses[2:], weights, **EXACT)


EXACTLY = [
    mk.Plan(pp=2, dp=3, schedule="1f1b", microbatches=2, bucket_mb=0.002),
    mk.Plan(pp=2, dp=2, zero=1, schedule="gpipe", microbatches=2, precision="bf16"),
    mk.Plan(dp=2, tp=2, zero=3, microbatches=2),
    mk.Plan(pp=2, tp=2, schedule="1f1b", microbatches=2, precision="fp16"),
]


@pytest.mark.soak
@pytest.mark.parametrize("plan", EXACTLY, ids=repr)
def test_the_same_mesh_goes_on_to_the_bit(train: Train, tmp_path: Path, plan: mk.Plan) -> None:
    model = gpt(dropout=0.2).float()
    whole = train(plan=plan, steps=5, checkpoint_every=2, checkpoint_dir=tmp_path, seed=3, **how(model=model))
    rest = train(plan=plan, steps=5, resume_from=tmp_path / "step-00000002", seed=3, **how(model=model))
    assert rest.losses == whole.losses[2:]
    torch.testing.assert_close(rest.state_dict(), whole.state_dict(), rtol=0, atol=0)
