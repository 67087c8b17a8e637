"""DDP equals serial training, and sends what torch's own DDP sends."""

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
from mpkit.parallel.microbatch import split
from mpkit.run import Run

Train = Callable[..., Run]
# Ranks get this module's functions by value, and need not import the module and what tests need.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def train(clusters: Callable[[int], mk.Cluster]) -> Train:
    """`train(model, data, plan, ...)` on as many ranks as the plan takes, waited for."""

    def run(model: nn.Module, data: Any, plan: mk.Plan, **how: Any) -> Run:
        return clusters(plan.ranks).train(model, data, plan, **how).wait()

    return run


def serial(
    model: nn.Module, data: Any, *, loss: Any, optimizer: Any, steps: int, microbatches: int = 1,
    max_grad_norm: float | None = None, lr_schedule: Callable[[int], float] | None = None,
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """The same training on one process, as anyone would write it."""
    model = copy.deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = optimizer(trained)
    rates = [group["lr"] for group in opt.param_groups]
    losses = []
    for step in range(steps):
        inputs, targets = data[step % len(data)]
        opt.zero_grad()
        total = 0.0
        for start, end in split(len(targets), microbatches):
            named = inputs if isinstance(inputs, dict) else {}
            given = inputs if isinstance(inputs, tuple) else () if named else (inputs,)
            outputs = model(*(x[start:end] for x in given), **{k: x[start:end] for k, x in named.items()})
            value = loss(outputs, targets[start:end]) * (end - start) / len(targets)
            value.backward()
            total += value.item()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(trained, max_grad_norm)
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate * (lr_schedule(step) if lr_schedule is not None else 1.0)
        opt.step()
        losses.append(total)
    return losses, model.state_dict()


def check_equal(train: Train, model: nn.Module, data: Any, plan: mk.Plan, **how: Any) -> Run:
    """Losses and weights after training by `plan` are those of serial training."""
    exact = next(model.parameters()).dtype == torch.float64
    tolerance = {"rtol": 1e-8, "atol": 1e-10} if exact else {"rtol": 1e-4, "atol": 1e-6}
    losses, weights = serial(model, data, microbatches=plan.microbatches, **how)
    run = train(model, data, plan, **how)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(losses), **tolerance)
    assert list(run.state_dict()) == list(weights)
    for name, value in run.state_dict().items():
        torch.testing.assert_close(value, weights[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")
    return run


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------- models that are no chains


class Residual(nn.Module):
    """Two convolutions and what skips them, as in a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(x)))


class ResNet(nn.Module):
    """Called by name, with an input that may be left out; its parts are in no order."""

    def __init__(self, classes: int = 3, width: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(2))
        self.stem = nn.Conv2d(1, width, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor, brightness: Tensor | None = None) -> Tensor:
        x = self.stem(images) if brightness is None else self.stem(images * brightness)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)) * self.scale)


@pytest.mark.parametrize("plan", [mk.Plan.serial(), mk.Plan.ddp(3, microbatches=2)], ids=repr)
def test_a_model_that_is_no_chain(train: Train, plan: mk.Plan) -> None:
    torch.manual_seed(1)
    model = ResNet().double()
    images, brightness, classes = normal(7, 1, 6, 6), normal(7, 1, 1, 1), torch.randint(3, (7,))
    how: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": sgd, "steps": 5}
    for inputs in ({"brightness": brightness, "images": images}, (images, brightness)):
        check_equal(train, model, [(inputs, classes)], plan, **how)
