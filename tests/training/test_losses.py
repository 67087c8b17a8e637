"""Losses that are no plain mean over samples: equal to plain PyTorch on the whole batch, under every plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpkit as mk
from mpkit.launch.session.run import Run
from tests.serial import EXACT, same, serial

Train = Callable[..., Run]

CLASSES = 5
PLANS = {
    "gpipe": mk.Plan.gpipe(2, 4),
    "dp": mk.Plan.dp(2, microbatches=2),
}


def net(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Of 8 samples; half of the second batch's targets are masked, so that whole micro-batches and replicas are."""
    torch.manual_seed(1)
    found = []
    for masked in ([2, 5], [0, 2, 4, 5, 6, 7]):
        targets = torch.randint(0, CLASSES, (8,))
        targets[masked] = -100
        found.append((torch.randn(8, 6, dtype=torch.float64), targets))
    return found


HOW: dict[str, Any] = {"optimizer": lambda params: torch.optim.AdamW(params, lr=0.05), "max_grad_norm": 0.3}


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ targets.T, torch.arange(len(outputs))) + outputs.std()


def test_a_loss_of_the_whole_batch_sees_it(train: Train) -> None:
    torch.manual_seed(1)
    plan = mk.Plan(pp=2, dp=2, schedule="naive")
    data = [(torch.randn(size, 6).double(), torch.randn(size, CLASSES).double()) for size in (8, 6)]
    losses, weights = serial(net(), data, loss=contrastive, steps=3, **HOW)
    same(
        train(net(), data, plan, loss=mk.whole_batch_loss(contrastive), steps=3, **HOW),
        losses,
        weights,
        **EXACT,
    )


@pytest.mark.parametrize("name", ["gpipe", "dp"])
def test_a_batch_of_masked_targets_only_is_nan_as_in_torch(train: Train, name: str) -> None:
    x, y = batches()[0]
    data = [(x, torch.full_like(y, -100)), (x, y)]
    how = {"loss": F.cross_entropy, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    losses, weights = serial(net(), data, steps=2, **how)
    run = train(net(), data, PLANS[name], steps=2, **how)
    assert math.isnan(run.losses[0]) and run.losses[1] == pytest.approx(losses[1], rel=1e-10)
    for key, value in run.state_dict().items():
        torch.testing.assert_close(value, weights[key], rtol=1e-8, atol=1e-10)


def test_what_is_loaded_later_is_looked_at_on_the_ranks(clusters: Callable[[int], mk.Cluster]) -> None:
    def by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
        valid = targets != -100
        picked = outputs.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
        return -(picked * valid).sum() / valid.sum()

    x, y = torch.randn(16, 6).double(), torch.randint(0, CLASSES, (16,))
    masked = y.clone()
    masked[13] = -100
    for targets, ends in ((y, "finished"), (masked, "failed")):
        data = mk.Batches(torch.utils.data.TensorDataset(x, targets), batch_size=4, shuffle=False)
        run = clusters(2).train(
            net(), data, mk.Plan.ddp(2), loss=by_hand, steps=4, optimizer=HOW["optimizer"]
        )
        if ends == "finished":
            run.wait()
            continue
        with pytest.raises(mk.errors.NotSerial, match=r"(?s)step 4.*ignored targets.*\(total, count\)"):
            run.wait()
    # and of one of torch's means nothing has to be known
    data = mk.Batches(torch.utils.data.TensorDataset(x, masked), batch_size=4, shuffle=False)
    run = clusters(2).train(
        net(),
        data,
        mk.Plan.ddp(2),
        loss=lambda o, t: F.cross_entropy(o, t),
        steps=4,
        optimizer=HOW["optimizer"],
    )
    parts = [(x[i : i + 4], masked[i : i + 4]) for i in range(0, 16, 4)]
    losses, _ = serial(net(), parts, loss=F.cross_entropy, steps=4, optimizer=HOW["optimizer"])
    assert run.wait().losses == pytest.approx(losses, rel=1e-10)
