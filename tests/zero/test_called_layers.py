"""Layers that some ranks call and others do not: ZeRO-2 trains them, and ZeRO-3 takes no layer for another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from tests.recipes import adamw, sgd
from tests.serial import Train, check_equal


class Routed(nn.Module):
    """Calls those of four equal layers that its samples name; the first two samples name others than the last two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0] == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(y[rows]))
        made: Tensor = self.last(y)
        return made


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(4, 4).double()
    x[:, 0] = torch.tensor([0.0, 1.0, 2.0, 3.0])
    return [(x, torch.randint(4, (4,)))]


HOW: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": adamw, "steps": 2}


def test_whole_parameters_train(train: Train) -> None:
    check_equal(train, Routed().double(), batches(), mk.Plan(dp=2, zero=2, unused="allow"), **HOW)


@pytest.mark.parametrize("options", [{}], ids=str)
def test_no_layer_is_taken_for_another_of_its_size(train: Train, options: dict[str, Any]) -> None:
    """Without the run's proof, too, which compares some steps only."""
    plan = mk.Plan(dp=2, zero=3, unused="allow", **options)
    with pytest.raises(
        mk.errors.CommMismatch, match=r"of experts\.\d.* of experts\.\d.*zero=2 keeps parameters whole"
    ):
        train(Routed().double(), batches(), plan, **HOW, verify=False)


class Returns(nn.Module):
    """Returns a parameter, for a penalty in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.weight.T


def test_a_returned_parameter_is_rejected_where_it_is_dropped(train: Train) -> None:
    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], targets) + outputs[1].square().sum()

    how = {"loss": loss, "optimizer": sgd, "steps": 2}
    with pytest.raises(mk.errors.MpkitError, match="under zero=3 is whole only while the layer computes"):
        train(Returns().double(), batches(), mk.Plan.zero(3, 2), **how)
    check_equal(train, Returns().double(), batches(), mk.Plan.zero(2, 2), **how)
