"""Learning-rate rules, and their warm-up in a training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit.strategies.update.learning_rate import ScalingRule


@pytest.mark.parametrize(
    ("rule", "power"), [(mk.optimizer.linear_scaling, 1.0), (mk.optimizer.sqrt_scaling, 0.5)]
)
def test_rates(rule: Callable[..., ScalingRule], power: float) -> None:
    for base, batch in ((32, 256), (256, 32), (10, 10)):
        found = rule(lr=0.3, base_batch=base, batch=batch, warmup_steps=5)
        assert found.lr == pytest.approx(0.3 * (batch / base) ** power)
        rates = [found.lr * found.schedule(step) for step in range(8)]
        assert rates[0] == pytest.approx(0.3)
        assert rates[5:] == [found.lr] * 3
        steps = torch.tensor(rates).diff()[:5]
        torch.testing.assert_close(steps, steps[:1].expand(5))  # equally high


def test_a_training_with_warm_up(clusters: Callable[[int], mk.Cluster]) -> None:
    torch.manual_seed(1)
    rule = mk.optimizer.linear_scaling(lr=0.01, base_batch=2, batch=8, warmup_steps=3)
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    data = [(torch.ones(8, 1).double(), torch.zeros(8, 1).double())]
    run = clusters(2).train(
        model, data, mk.Plan.ddp(2), loss=lambda outputs, targets: (outputs - targets).mean(), steps=5,
        optimizer=lambda params: torch.optim.SGD(params, lr=rule.lr), lr_schedule=rule.schedule,
    ).wait()  # fmt: skip
    # The gradient is 1: the weight goes down by the rate of each step.
    moved = -run.state_dict()["weight"].item()
    assert moved == pytest.approx(0.01 + 0.02 + 0.03 + 0.04 + 0.04)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lr": 0}, "lr=0.*a number above 0"),
        ({"base_batch": 0}, "base_batch=0.*whole number, 1 or more"),
        ({"batch": 12.5}, "batch=12.5"),
        ({"warmup_steps": -1}, "warmup_steps=-1.*0 or more"),
    ],
)
def test_errors(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        mk.optimizer.linear_scaling(**{"lr": 0.1, "base_batch": 8, "batch": 16} | wrong)  # type: ignore[arg-type]
