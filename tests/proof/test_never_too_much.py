"""The proof never says more than it knows: noise, differences, what lives between steps, what begins later."""

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gamma, VonMises
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.prepare import proof_steps
from tests.recipes import sgd
from tests.serial import Clusters

DDP, WIDE = mk.Plan.ddp(2), torch.float64
X, Y = (torch.randn(96, width, generator=torch.Generator().manual_seed(1), dtype=WIDE) for width in (6, 3))


def net(*first: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*first, nn.Linear(6, 8, dtype=WIDE), nn.Tanh(), nn.Linear(8, 3, dtype=WIDE))


def batches(targets: Any = Y) -> list[tuple[Tensor, Any]]:
    return [(X[i : i + 8], targets[i : i + 8]) for i in range(0, 96, 8)]


def train(clusters: Clusters, model: nn.Module, plan: mk.Plan = DDP, **how: Any) -> Any:
    given = {"data": batches(), "loss": F.mse_loss, "optimizer": sgd, "steps": 3, "verify": "all"} | how
    return clusters(plan.ranks).train(model, plan=plan, **given).wait().proof


@pytest.fixture(autouse=True)
def no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_steps.random.SystemRandom, "choice", lambda self, steps: steps[0])


# ---- random numbers: heard, or said


class Noisy(nn.Module):
    """Multiplies by noise, and centres the batch from the fifth forward on, which replicas cannot."""

    def __init__(self, noise: Callable[[Tensor], Tensor], *, wrong: bool) -> None:
        super().__init__()
        self.noise, self.wrong, self.calls = noise, wrong, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made = x * self.noise(x)
        return made - made.mean(0) if self.wrong and self.calls > 4 else made


def ones(x: Tensor) -> Tensor:
    return torch.ones_like(x)


HEARD: dict[str, Callable[[Tensor], Tensor]] = {
    "gamma": lambda x: Gamma(ones(x), ones(x)).rsample(),
    "binomial": lambda x: torch.binomial(4 * ones(x), ones(x) / 2),
}


@pytest.mark.parametrize("noise", HEARD.values(), ids=HEARD)
def test_torchs_draws_are_heard(clusters: Clusters, noise: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(mk.errors.NotSerial, match="step 5 is not that of serial training"):
        train(clusters, net(Noisy(noise, wrong=True)), steps=6)


UNHEARD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "os.urandom": (
        lambda x: x.new_tensor([b / 128 for b in os.urandom(x.numel())]).view(x.shape),
        "repeats of",
    ),
    "random": (lambda x: x.new_tensor(random.random() + 0.5), "Python's or NumPy's generators"),
    "vonmises": (lambda x: 1 + VonMises(0 * x, ones(x)).sample(), "looks at values while it draws|equal"),
}


@pytest.mark.parametrize(("noise", "says"), UNHEARD.values(), ids=UNHEARD)
def test_noise_that_nobody_hears_is_no_tolerance(
    clusters: Clusters, noise: Callable[[Tensor], Tensor], says: str
) -> None:
    proof = train(clusters, net(Noisy(noise, wrong=False)), steps=2)
    assert proof.status == "not verified" or proof.loss < 1e-7
    assert proof.status == "equal" or any(each in str(proof) for each in says.split("|"))


class Seeds(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "before":
            torch.manual_seed(7)
            return F.dropout(x, 0.5, self.training)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return x * torch.rand_like(x)


@pytest.mark.parametrize("how", ["before", "within"])
def test_a_seed_within_a_forward_stops_the_run(clusters: Clusters, how: str) -> None:
    for plan in (DDP, mk.Plan.serial(), mk.Plan.gpipe(2, 2)):
        with pytest.raises(
            mk.errors.MpkitError, match=r"sets the seed of torch's random numbers \(torch.manual_seed\)"
        ):
            train(clusters, net(Seeds(how)), plan)


# ---- a difference is never dropped


class Balanced(nn.Module):
    """Keeps a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=WIDE)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        self.kept = made.square().mean()
        return torch.tanh(made)


def test_a_loss_that_refers_to_the_model(clusters: Clusters) -> None:
    def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda out, y: F.mse_loss(out, y) + 0.1 * sum(m.kept for m in model if hasattr(m, "kept"))

    model = net(Balanced(), Balanced())
    assert train(clusters, model, loss=loss_of(model)).steps == (1, 2, 3)
    with pytest.raises(mk.errors.NotSerial, match=r"step 1 .* the loss is"):
        train(clusters, model, mk.Plan.gpipe(2, 2), loss=loss_of(model))


class Late(nn.Module):
    """Centres the batch from the second forward on, and cannot be copied after the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        if threading.current_thread().name == "mpkit-proof" and self.calls:
            raise TypeError("a handle")
        return super().__reduce_ex__(protocol)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x - x.mean(0) if self.calls > 1 else x


def test_a_difference_whose_step_cannot_be_repeated(clusters: Clusters) -> None:
    with pytest.raises(
        mk.errors.NotSerial, match=r"step 2 .* The cause is unknown, since the step cannot be repeated"
    ):
        train(clusters, net(Late()))


# ---- what lives between steps


class Decays(torch.optim.SGD):
    """A rate that falls with a counter of its own, and with one in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] *= 0.9
            group["lr"] /= 1 + 0.01 * self.steps
        return super().step(closure)


def halve(ctx: Any, step: int) -> None:
    for weight in ctx.weights.values():
        weight.mul_(0.5)


LIVES: dict[str, dict[str, Any]] = {
    "on_step": {"on_step": halve},
    "an optimizer's counter": {"optimizer": Decays},
}


@pytest.mark.parametrize("how", LIVES.values(), ids=LIVES)
def test_what_lives_between_steps_is_carried(clusters: Clusters, how: dict[str, Any]) -> None:
    model = how.get("model", net)()
    options = {key: value for key, value in how.items() if key != "model"}
    proof = train(clusters, model, mk.Plan.ddp(2), steps=8, verify=(1, 2, 6, 8), **options)
    assert (proof.steps, proof.why_not) == ((1, 2, 6, 8), "")


# ---- what begins later


def masked(out: Tensor, y: Tensor) -> Tensor:
    mask = (y != -1.0).to(out)
    return ((out - y).square() * mask).sum() / mask.sum()


def hidden(value: float) -> Tensor:
    made = Y.clone()
    made[72:75] = value
    return made


class Warms(torch.optim.SGD):
    """Normalizes the gradient after its warm-up."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.steps > 9:
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            for gradient in gradients:
                gradient.div_(norm)
        return super().step(closure)


def test_a_mask_that_hides_something_later(clusters: Clusters) -> None:
    with pytest.raises(mk.errors.NotSerial, match="step 10 is not that of serial training"):
        train(clusters, net(), steps=12, verify="first", data=batches(hidden(-1.0)), loss=masked)


SAID: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a mask": (
        lambda: {"data": batches(hidden(-1.0)), "loss": masked, "verify": (1,)},
        "in the loss, div divides by another",
    ),
    "an optimizer": (lambda: {"optimizer": Warms, "plan": DDP}, "the optimizer computes "),
}


@pytest.mark.parametrize(("how", "says"), SAID.values(), ids=SAID)
def test_what_acts_first_in_a_step_that_was_not_compared(
    clusters: Clusters, how: Callable[[], dict[str, Any]], says: str
) -> None:
    options = {"model": net(), "steps": 12, "verify": "first"} | how()
    proof = train(clusters, options.pop("model"), options.pop("plan", DDP), **options)
    assert says in proof.badge
    assert "for the first time in step 10" in proof.badge
    assert proof.why_not and str(proof).endswith(proof.why_not) and proof.badge.endswith(proof.why_not)
