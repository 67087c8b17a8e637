"""Optimizers that are more than elementwise: refused where ranks hold parts of a parameter, or stopped in step 1."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import mpkit as mk
from mpkit.strategies.prepare.prepare import prepare
from tests.recipes import sgd

SGD, AdamW, Optimizer = torch.optim.SGD, torch.optim.AdamW, torch.optim.Optimizer


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4)]
    return nn.Sequential(*layers).double()


torch.manual_seed(1)
DATA = [(torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)) for _ in range(2)]


def update(optimizer: Optimizer) -> Iterable[tuple[dict[str, Any], nn.Parameter, Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, parameter.grad


class Lamb(Optimizer):
    """Each parameter by its own norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, g in update(self):
            p.sub_(group["lr"] * g * p.norm() / (g.norm() + 1e-6))


class Clips(SGD):
    """By the norm of all gradients together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for _, p, _ in update(self)], 0.1)
        super().step()


class Noise(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for _, p, _ in update(self):
            p.add_(torch.randn_like(p), alpha=0.01)


class MuonAndAdamW(Optimizer):
    """Matrices by Muon, the rest by AdamW."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.01})
        self.muon = torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.01)
        self.adamw = AdamW([p for p in params if p.dim() != 2], lr=0.01)
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.muon.step()
        self.adamw.step()


PLANS = {
    "serial": mk.Plan.serial(2), "ddp": mk.Plan.ddp(2), "gpipe": mk.Plan.gpipe(2, 2),
    "zero1": mk.Plan.zero(1, 2), "zero2": mk.Plan.zero(2, 2), "zero3": mk.Plan.zero(3, 2), "tp": mk.Plan.tp(2),
    "tp x zero": mk.Plan(dp=2, tp=2, zero=1),
}  # fmt: skip


def on_parameters(params: Any) -> Optimizer:
    params = list(params)
    for p in params:
        p.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return SGD(params, lr=0.1)


REFUSED: dict[str, tuple[Any, list[str], str]] = {
    "norms of a parameter": (
        Lamb, ["zero2", "zero3", "tp", "tp x zero"], r"Lamb is not known to change each element .*Plan\.ddp\("
    ),
    "two optimizers in one": (
        MuonAndAdamW, ["zero2"], r"MuonAndAdamW with Plan\(dp=2, zero=2\).*whole on one rank: Plan\(dp=2, zero=1\)"
    ),
    "hooks on parameters": (on_parameters, ["serial", "ddp", "gpipe"], r"the hook <lambda> on the parameter 0\.weight"),
}  # fmt: skip


def prepared(optimizer: Any, plan: mk.Plan) -> None:
    prepare(net(), DATA, plan, optimizer=optimizer, loss=F.mse_loss, steps=2, ranks=plan.ranks)


@pytest.mark.parametrize("what", REFUSED)
def test_refused_where_it_looks_beyond_its_part(what: str) -> None:
    optimizer, kinds, words = REFUSED[what]
    for kind in kinds:
        with pytest.raises(ValueError, match=r"\Aoptimizer") as caught:
            prepared(optimizer, PLANS[kind])
        assert re.search(words, str(caught.value)), (kind, str(caught.value))


def test_one_that_is_declared_is_taken_at_its_word() -> None:
    prepared(mk.optimizer.elementwise(Lamb), PLANS["zero2"])
    prepared(Lamb, PLANS["zero1"])  # each parameter whole, on one rank


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [(Clips, "gpipe"), (Clips, "zero1"), (Noise, "ddp"), (mk.optimizer.elementwise(Lamb), "zero2")],
    ids=["a norm over all in stages", "a norm over all by owner", "random numbers", "declared, and is not"],
)
def test_what_looks_beyond_its_part_is_stopped_in_step_1(train: Any, optimizer: Any, kind: str) -> None:
    makes = optimizer if kind == "zero2" else lambda params: optimizer(params, lr=0.1)
    with pytest.raises(mk.errors.NotSerial, match="after the update"):
        train(net(), DATA, PLANS[kind], loss=F.mse_loss, optimizer=makes, steps=2)


def test_a_hook_on_all_optimizers() -> None:
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(ValueError, match=r"A hook on all optimizers \(<lambda>"):
            prepared(sgd, PLANS["serial"])
    finally:
        handle.remove()
    prepared(sgd, PLANS["serial"])


# ---- Parameter groups by anything that a function can look at: as in a plain loop, or rejected by name.


def by_number(model: nn.Module) -> Callable[[Any], Optimizer]:
    numbers = {id(p) for p in model[0].parameters()}  # type: ignore[index]
    return lambda ps: SGD([{"params": [p], "lr": 0.0 if id(p) in numbers else 0.1} for p in ps], lr=1.0)


def by_value(model: nn.Module) -> Callable[[Any], Optimizer]:
    return lambda ps: SGD([{"params": [p], "lr": 0.1 * float(p.detach().norm())} for p in ps], lr=1.0)


@pytest.mark.parametrize("function", [by_number, by_value])
def test_what_a_rank_cannot_see_is_refused(function: Any) -> None:
    model = net()
    how: dict[str, Any] = {"ranks": 2, "loss": F.mse_loss, "optimizer": function(model), "steps": 1}
    with pytest.raises(ValueError, match=r"0\.weight has .* in a loop with .* on a rank.*by_name"):
        prepare(model, DATA, mk.Plan.zero(3, 2), **how)
