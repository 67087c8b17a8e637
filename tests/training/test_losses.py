"""Losses that are no plain mean over samples: equal to plain PyTorch on the whole batch, under every plan."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.update.learning_rate import ScalingRule
from tests.serial import EXACT, Clusters, Train, same, serial

CLASSES = 5
PLANS = {"gpipe": mk.Plan.gpipe(2, 4), "dp": mk.Plan.dp(2, microbatches=2)}


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


def test_what_is_loaded_later_is_looked_at_on_the_ranks(clusters: Clusters) -> None:
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
        with pytest.raises(mk.errors.NotSerial, match=r"(?s)step 4.*ignore_index.*\(total, count\)"):
            run.wait()
    # and of one of torch's means nothing has to be known
    data = mk.Batches(torch.utils.data.TensorDataset(x, masked), batch_size=4, shuffle=False)
    run = clusters(2).train(
        net(), data, mk.Plan.ddp(2), loss=lambda o, t: F.cross_entropy(o, t), steps=4,
        optimizer=HOW["optimizer"],
    )  # fmt: skip
    parts = [(x[i : i + 4], masked[i : i + 4]) for i in range(0, 16, 4)]
    losses, _ = serial(net(), parts, loss=F.cross_entropy, steps=4, optimizer=HOW["optimizer"])
    assert run.wait().losses == pytest.approx(losses, rel=1e-10)


# ---- Learning-rate rules, and their warm-up in a training.


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


def test_a_training_with_warm_up(clusters: Clusters) -> None:
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


@pytest.mark.parametrize(("wrong", "says"), [
    ({"lr": 0}, "lr=0.*a number above 0"),
    ({"base_batch": 0}, "base_batch=0.*whole number, 1 or more"),
    ({"batch": 12.5}, "batch=12.5"),
    ({"warmup_steps": -1}, "warmup_steps=-1.*0 or more"),
])  # fmt: skip
def test_errors(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        mk.optimizer.linear_scaling(**{"lr": 0.1, "base_batch": 8, "batch": 16} | wrong)  # type: ignore[arg-type]


# ---- 16 bits, beside 16 bits in plain PyTorch: unusual dtypes, overflows that skip a step, and clipping.


class TiedHead(nn.Module):
    """A model whose first and last layers share a weight, with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(),
            nn.Linear(8, 8, bias=False),
        )  # fmt: skip
        self.layers[4].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


@pytest.mark.parametrize("plan", [
    mk.Plan.dp(2, precision="bf16"),
    mk.Plan.zero(3, 2, precision="bf16", offload="optimizer"),
    mk.Plan(pp=2, dp=2, microbatches=2, zero=1, precision="bf16"),
], ids=repr)  # fmt: skip
def test_trained_weights_have_32_bits(clusters: Clusters, plan: mk.Plan) -> None:
    """A step of 1e-4 vanishes in bf16 beside weights of 0.3; the masters have it, and so have the weights."""
    torch.manual_seed(0)
    net = TiedHead()
    data = [(torch.randn(8, 8), torch.arange(8))]
    run = (
        clusters(plan.ranks)
        .train(
            net, data, plan, loss=F.cross_entropy, optimizer=lambda p: torch.optim.Adam(p, lr=1e-4), steps=2,
            ema=0.5,
        )
        .wait()
    )  # fmt: skip
    trained, averaged = run.state_dict(), run.ema_state_dict()
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        assert trained[name].dtype == averaged[name].dtype == torch.float32
        assert trained[name].shape == parameter.shape
        step = (trained[name] - parameter).detach().abs()
        assert 1e-5 < float(step.mean()) < 2.2e-4, name  # Adam's first steps are lr each
        assert float((averaged[name] - parameter).detach().abs().mean()) < float(step.mean())
    assert torch.equal(trained["layers.0.weight"], trained["layers.4.weight"])
    assert set(trained) == set(net.state_dict())
