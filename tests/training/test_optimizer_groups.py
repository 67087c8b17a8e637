"""Parameter groups by anything that a function can look at: as in a plain loop, or rejected by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import mpkit as mk
from mpkit.strategies.prepare.prepare import prepare

WIDTH = 6


class Gain(nn.Parameter):
    """A parameter of a class of its own."""


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        Scale(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
    )
    model = nn.Sequential(*layers).double()
    for module in model:
        for parameter in module.parameters():
            parameter.depth = 1 if module is model[0] else 2  # type: ignore[attr-defined]
    model[3].weight.no_decay = True
    return model


def grouped(chosen: set[nn.Parameter]) -> Callable[[Any], Optimizer]:
    """Group by marks, a class, the parameters themselves, and shape."""

    def group(p: nn.Parameter) -> dict[str, float]:
        return {
            "lr": 0.1 * p.depth * (2 if p in chosen else 1) * (3 if isinstance(p, Gain) else 1),  # type: ignore[attr-defined]
            "weight_decay": 0.0 if hasattr(p, "no_decay") else 0.3,
            "momentum": 0.9 if p.ndim > 1 else 0.0,
        }

    return lambda parameters: SGD([{"params": [p], **group(p)} for p in parameters], lr=1.0)


DATA = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_number(model: nn.Module) -> Callable[[Any], Optimizer]:
    numbers = {id(p) for p in model[0].parameters()}  # type: ignore[index]
    return lambda ps: SGD([{"params": [p], "lr": 0.0 if id(p) in numbers else 0.1} for p in ps], lr=1.0)


def by_value(model: nn.Module) -> Callable[[Any], Optimizer]:
    return lambda ps: SGD([{"params": [p], "lr": 0.1 * float(p.detach().norm())} for p in ps], lr=1.0)


@pytest.mark.parametrize("function", [by_number, by_value])
@pytest.mark.parametrize("plan", [mk.Plan.zero(3, 2)], ids=str)
def test_what_a_rank_cannot_see_is_refused(function: Any, plan: mk.Plan) -> None:
    model = net()
    with pytest.raises(ValueError, match=r"0\.weight has .* in a loop with .* on a rank.*by_name"):
        prepare(
            model, [tuple(DATA)], plan, ranks=plan.ranks, loss=F.mse_loss, optimizer=function(model), steps=1
        )
