"""What a model that is a chain of layers may do in a pipeline; random chains and schedules.

That training equals serial training with each feature is shown by tests/mesh/test_pairs.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from tests.serial import Train


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


# ---------------------------------------------------------------- random chains, random schedules


# ---------------------------------------------------------------- what a chain may do


def linears(*widths: int) -> list[nn.Module]:
    return [nn.Linear(a, b).double() for a, b in pairwise(widths)]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------- what it leaves alone, and what it leaves behind


def test_the_trace_has_every_action_once_a_step(train: Train) -> None:
    torch.manual_seed(13)
    model, data = GPT(layers=3, width=16, heads=2, length=12), text_batches(6, 12, 3)
    run = train(model, data, mk.Plan.gpipe(4, 3), loss=next_token_loss, optimizer=adamw, steps=2)
    frame = run.timeline().to_dataframe()
    for kind in ("forward", "backward"):
        rows = frame[frame["kind"] == kind]
        found = sorted(zip(rows["rank"], rows["stage"], rows["microbatch"], strict=True))
        assert found == sorted((s, s, m) for s in range(4) for m in range(3) for _ in range(2))
        assert (rows["flops"] > 0).mean() > 0.7  # an embedding has none
    assert (frame["kind"] == "optimizer").sum() == 4 * 2
    # each boundary: 6 samples x 12 tokens x 16 floats, forward and back
    sends = frame[frame["kind"] == "send"].groupby("rank")["bytes"].sum().to_dict()
    # and the last rank tells the three others the loss
    loss = {3: 2 * 3 * 8}
    assert sends == {
        rank: 2 * 6 * 12 * 16 * 4 * (1 if rank in (0, 3) else 2) + loss.get(rank, 0) for rank in range(4)
    }


def test_a_loss_that_is_nan_is_said_once_with_its_step(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(15)
    model = nn.Sequential(*linears(3, 3, 2))
    good, bad = (normal(4, 3), normal(4, 2)), (normal(4, 3) * torch.nan, normal(4, 2))
    run = train(model, [good, good, bad], mk.Plan.gpipe(2, 2), loss=F.mse_loss, optimizer=sgd, steps=5)
    said = [line for line in capsys.readouterr().out.splitlines() if "the loss is nan" in line]
    assert len(said) == 1
    assert "step 2" in said[0]
    assert [loss == loss for loss in run.losses] == [True, True, False, False, False]


class Trap(nn.Module):
    """Fails on data that begins with 7."""

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 0] == 7).any():
            raise ArithmeticError("seven")
        return x


def test_a_failure_says_rank_step_stage_and_micro_batch(train: Train) -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    torch.manual_seed(16)
    model = nn.Sequential(Same(), Trap(), *linears(3, 2))
    bad = normal(4, 3)
    bad[3, 0] = 7
    data = [(normal(4, 3), normal(4, 2)), (bad, normal(4, 2))]
    with pytest.raises(mk.RankFailed, match="seven") as caught:
        train(model, data, mk.Plan.gpipe(3, 4, cut=[1, 2]), loss=F.mse_loss, optimizer=sgd, steps=3)
    error = caught.value
    assert (error.rank, error.step, error.stage, error.microbatch) == (1, 1, 1, 3)
    assert "in forward" in error.traceback
    # and the next training works
    train(model, data[:1], mk.Plan.gpipe(3, 4, cut=[1, 2]), loss=F.mse_loss, optimizer=sgd, steps=1)
