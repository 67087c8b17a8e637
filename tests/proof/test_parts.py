"""Why the parts of a batch do not add up to it: a kind of loss, or a layer; of others nothing is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpkit as mk
from mpkit.strategies.loss.mean import MeanLoss
from mpkit.strategies.proof.attempt import Attempt
from mpkit.strategies.proof.draws import StepDraws
from mpkit.strategies.proof.parts import explain_parts
from mpkit.strategies.reference.serial import Serial

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double(), torch.zeros(8, 4).double()
CLASSES = torch.tensor([0, 1, 2, 3, 1, 2, 0, 3])
PLANS = [mk.Plan.ddp(2), mk.Plan.gpipe(2, 4), mk.Plan(pp=2, dp=2, microbatches=2)]


class Fn(nn.Module):
    """A layer that is one function."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *middle, nn.Tanh(), nn.Linear(4, 4)).double()


def explained(
    model: nn.Module, plan: mk.Plan, loss: Any = F.mse_loss, targets: Any = Y, inputs: Any = X
) -> str:
    serial = Serial(model, loss, lambda named: torch.optim.SGD(named.values(), lr=0.1))
    draws = StepDraws(plan, 8, [{} for _ in range(plan.ranks)])
    return explain_parts(plan, Attempt(serial, (inputs, targets), draws, 1.0), 1e-8)


def masked_mean(out: Tensor, y: Any) -> Tensor:
    return ((out - y[0]).square() * y[1]).sum() / y[1].sum()


def by_hand(out: Tensor, y: Tensor) -> Tensor:
    valid = y != -100
    return -(out.log_softmax(-1).gather(1, y.clamp(min=0)[:, None])[:, 0] * valid).sum() / valid.sum()


SOME = torch.arange(8)[:, None] < torch.tensor([8, 6, 3, 1])
LOSSES = {
    "a sum": (lambda out, y: (out - y).square().sum(), Y, "is a sum.*len(y) / 8"),
    "a masked mean": (masked_mean, (Y, SOME), "mean over something else than samples.*(total, count)"),
    "ignored targets": (by_hand, CLASSES.masked_fill(CLASSES == 3, -100), "ignore_index.*mk.mean_loss("),
    "a spread": (
        lambda out, y: F.mse_loss(out, y) + out.std(),
        Y,
        "needs the whole batch.*mk.whole_batch_loss(",
    ),
    "broadcast": (lambda out, y: F.mse_loss(out[:, :1], y[:, 0]), Y + X, "needs the whole batch"),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_named_by_their_kind(name: str, plan: mk.Plan) -> None:
    loss, targets, message = LOSSES[name]
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), explained(net(), plan, loss, targets))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (masked_mean, (Y, torch.ones(8, 4, dtype=torch.bool))), (by_hand, CLASSES), (F.huber_loss, Y),
        (MeanLoss(F.cross_entropy), CLASSES.masked_fill(CLASSES == 3, -100)),
    ],
    ids=["mask of ones", "no target is masked", "elementwise", "counted"],
)  # fmt: skip
def test_of_other_losses_nothing_is_said(loss: Any, targets: Any, plan: mk.Plan) -> None:
    assert explained(net(), plan, loss, targets) == ""


class Average(nn.Module):
    """Remembers the mean of what it has seen."""

    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.used = used
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean += 0.1 * (x.mean(0) - self.mean)
        return x - self.mean if self.used else x


LAYERS = {
    "the batch's mean": Fn(lambda x: x - x.mean(0)),
    "its length": Fn(lambda x: x * len(x)),
    "a softmax over it": Fn(lambda x: x * x.softmax(0)),
    "a little of its neighbour": Fn(lambda x: x + 1e-4 * x.roll(1, 0)),
    "an average that it keeps": Average(used=True),
}


@pytest.mark.parametrize("plan", [mk.Plan.ddp(2), mk.Plan.gpipe(2, 4), mk.Plan.dp(2)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_look_at_the_batch_are_named(name: str, plan: mk.Plan) -> None:
    assert re.match(r"The layer '1' .*other samples", explained(net(LAYERS[name]), plan))
