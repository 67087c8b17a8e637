"""Models with parameters of two dtypes: neither the checks nor the proof take rounding for a fault."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from tests.recipes import adamw
from tests.serial import Train


class Mixed(nn.Module):
    """A layer of one dtype between inputs and a head of another."""

    def __init__(self, inner: torch.dtype, outer: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(32, 32).to(inner), nn.Linear(32, 5).to(outer)
        self.dtypes = inner, outer

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = self.dtypes
        made: Tensor = self.head(self.inner(x.to(inner)).to(outer).tanh())
        return made


@pytest.mark.filterwarnings("ignore:(?s).*That may be rounding")
@pytest.mark.parametrize(
    ("inner", "outer"), [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("zero", [0, 3])
def test_a_run_is_proved_with_clipped_gradients(
    train: Train, inner: torch.dtype, outer: torch.dtype, zero: int
) -> None:
    """The norm over both dtypes is as precise as the finer one needs."""
    torch.manual_seed(1)
    data = [(torch.randn(8, 32, dtype=outer), torch.randint(5, (8,))) for _ in range(2)]
    how = {"loss": F.cross_entropy, "optimizer": adamw, "steps": 2, "max_grad_norm": 0.05}
    run = train(Mixed(inner, outer), data, mk.Plan(dp=2, zero=zero), **how, verify="all")
    assert str(run.proof).startswith("equal to serial training")
