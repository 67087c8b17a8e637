"""The pipeline runtime: any valid schedule, on real ranks, equals serial training."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.run import Run
from mpkit.schedule import Schedule

Train = Callable[..., Run]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def train(clusters: Callable[[int], mk.Cluster]) -> Train:
    """`train(model, data, plan, ...)` on as many ranks as the plan takes, waited for."""

    def run(model: nn.Module, data: Any, plan: mk.Plan, **how: Any) -> Run:
        return clusters(plan.ranks).train(model, data, plan, **how).wait()

    return run


def serial(model: nn.Module, data: Any, *, loss: Any, optimizer: Any, steps: int) -> tuple[list[float], Any]:
    model = copy.deepcopy(model)
    opt = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        inputs, targets = data[step % len(data)]
        opt.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        opt.step()
        losses.append(value.item())
    return losses, model.state_dict()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_first(train: Train) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]).double()
    data = [(normal(6, 6), normal(6, 6)) for _ in range(2)]
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd, "steps": 5}
    losses, weights = serial(model, data, **how)
    split = Schedule(["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"])
    mixed = Schedule(
        ["0F0 3F0 3I0 0F1 3F1 3B1 3W0 0B0 0I1 0W1", "1F0 2F0 1F1 2F1 2I0 1I0 2B1 1I1 1W1 1W0 2W0"],
        stage_to_rank=(0, 1, 1, 0),
    )
    for schedule in (split, mixed):
        for recompute in ("none", "full"):
            plan = mk.Plan.from_schedule(schedule, recompute=recompute)
            run = train(model, data, plan, **how)
            torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(losses), rtol=1e-8, atol=1e-10)
            for name, value in run.state_dict().items():
                torch.testing.assert_close(value, weights[name], rtol=1e-8, atol=1e-10)
