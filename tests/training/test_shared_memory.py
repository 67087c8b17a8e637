"""Tensors of a model in the same memory: plain PyTorch updates both at once, and copies on ranks would not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.prepare.checks import find_shared_memory
from mpkit.strategies.prepare.prepare import prepare
from tests.recipes import sgd


class Reads(nn.Module):
    """Sees its weight through a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("rows", self.layer.weight.data[1:3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) + x @ self.rows.T @ self.rows
        return made


def transposed() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    return model


@pytest.mark.parametrize(
    ("make", "works"),
    [
        (transposed, r"What works: to compute 1.weight from 0.weight in the forward; or a copy"),
        (
            lambda: nn.Sequential(Reads(), nn.Linear(4, 4)),
            r"0.rows from 0.layer.weight in the forward; .*clone",
        ),
    ],
)
@pytest.mark.parametrize("plan", [mk.Plan.ddp(2), mk.Plan.gpipe(2, 2)], ids=repr)
def test_an_alias_is_rejected_by_every_plan(make: Callable[[], nn.Module], works: str, plan: mk.Plan) -> None:
    data = [(torch.randn(4, 4), torch.randn(4, 4))]
    with pytest.raises(ValueError, match=works):
        prepare(make(), data, plan, ranks=plan.ranks, loss=F.mse_loss, optimizer=sgd, steps=1)


def test_views_of_one_memory_that_do_not_overlap_are_separate() -> None:
    """As flattened weights are; and frozen tensors may be seen twice, since nothing changes them."""
    flat, model = torch.randn(4, 8), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight, model[1].weight = (nn.Parameter(flat[:, i::2]) for i in range(2))
    assert find_shared_memory(model) is None
    frozen = transposed().requires_grad_(False)
    frozen[1].bias.requires_grad_(True)
    assert find_shared_memory(frozen) is None
    model[1].weight = model[0].weight
    assert find_shared_memory(model) is None, "one parameter in two places is a tie, which ranks keep"
