"""Optimizers under every plan: equal to plain PyTorch's, or refused before a rank starts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import mpkit as mk
from mpkit.strategies.prepare.prepare import prepare

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


class ByPlace(SGD):
    """Faster for later parameters; decides in the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for i, (_, p, g) in enumerate(update(self)):
            p.sub_(g, alpha=0.01 * (i + 1))


class Rows(SGD):
    """Each row of a matrix by its own size."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _, p, g in update(self):
            p.sub_(g / g.abs().mean(-1, keepdim=True), alpha=0.01)


class Counts(SGD):
    """The rate falls with a count that is in no state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        super().step()


class Anchored(SGD):
    """Reads the parameters when it is made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["anchor"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, g in update(self):
            p.sub_(group["lr"] * (g + 0.1 * (p - self.state[p]["anchor"])))


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


class Wants(SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()


def sgd(params: Any) -> Optimizer:
    return SGD(params, lr=0.1)


PLANS = {
    "serial": mk.Plan.serial(2),
    "ddp": mk.Plan.ddp(2),
    "dp": mk.Plan.dp(2),
    "gpipe": mk.Plan.gpipe(2, 2),
    "zb_h1": mk.Plan.pipeline("zb_h1", 2, 2),
    "interleaved": mk.Plan(pp=2, schedule="interleaved_1f1b", microbatches=2, virtual_stages=2),
    "zero1": mk.Plan.zero(1, 2),
    "zero2": mk.Plan.zero(2, 2),
    "zero3": mk.Plan.zero(3, 2),
    "2d": mk.Plan(pp=2, dp=2, zero=1, microbatches=2),
    "tp": mk.Plan.tp(2),
    "tp x zero": mk.Plan(dp=2, tp=2, zero=1),
}


# ---------------------------------------------------------------- refused


def closing(params: Any) -> Optimizer:
    """Clips what it was made of, whatever the optimizer holds."""
    params = list(params)
    made = SGD(params, lr=0.1)
    inner = made.step
    made.step = lambda *_: (nn.utils.clip_grad_norm_(params, 0.1), inner())[1]  # type: ignore[assignment,method-assign,func-returns-value]
    return made


def on_parameters(params: Any) -> Optimizer:
    params = list(params)
    for p in params:
        p.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return SGD(params, lr=0.1)


def picky(params: Any) -> Optimizer:
    """Steps whole matrices and vectors of this model only."""
    made = SGD(params, lr=0.1)
    inner = made.step

    def step(closure: Any = None) -> Any:
        assert all(tuple(p.shape) in {(6, 4), (6, 6), (4, 6), (6,), (4,)} for _, p, _ in update(made)), (
            "whole"
        )
        return inner()

    made.step = step  # type: ignore[method-assign]
    return made


COUPLED = r"what becomes of one parameter depends on others .*max_grad_norm=1\.0.*Plan\.ddp\(2\)"
MIXES = r"changes an element by what the others are .*Plan\.ddp\(2\)"
REFUSED: dict[str, tuple[Any, list[str], str]] = {
    "a norm over all": (Clips, ["gpipe", "zero1", "zero3", "tp"], r"Clips with Plan.*" + COUPLED),
    "over what it was made of": (closing, ["zero1", "gpipe"], COUPLED),
    "a place among all": (ByPlace, ["gpipe", "zero2"], COUPLED),
    "norms of a parameter": (Lamb, ["zero2", "zero3", "tp"], MIXES),
    "rows": (Rows, ["zero2", "tp"], MIXES),
    "random numbers": (Noise, ["ddp", "gpipe", "zero1"], r"draws random numbers, perhaps.*Plan\.serial\(\)"),
    "what parameters are at first": (Anchored, ["zero2", "tp"], MIXES),
    "two optimizers in one": (
        MuonAndAdamW, ["zero2"], r"MuonAndAdamW with Plan\(dp=2, zero=2\).*whole on one rank: Plan\(dp=2, zero=1\)"
    ),
    "whole parameters only": (picky, ["zero2"], r"fails on parts: AssertionError: whole.*mk\.optimizer\.elementwise\("),
    "a closure": (Wants, ["serial", "gpipe"], r"a step of Wants fails .*'closure'"),
    "sparse gradients": (torch.optim.SparseAdam, ["serial"], r"SparseAdam does not support dense gradients"),
    "hooks on parameters": (on_parameters, ["serial", "ddp", "gpipe"], r"the hook <lambda> on the parameter 0\.weight"),
}  # fmt: skip


def prepared(
    optimizer: Any, plan: mk.Plan, model: nn.Module | None = None, data: Any = DATA, **how: Any
) -> None:
    how = {"loss": F.mse_loss, "steps": 2, "ranks": plan.ranks} | how
    prepare(net() if model is None else model, data, plan, optimizer=optimizer, **how)


@pytest.mark.parametrize("what", REFUSED)
def test_refused_where_it_looks_beyond_its_part(what: str) -> None:
    optimizer, kinds, words = REFUSED[what]
    for kind in kinds:
        with pytest.raises(ValueError, match=r"\Aoptimizer") as caught:
            prepared(optimizer, PLANS[kind])
        assert re.search(words, str(caught.value)), (kind, str(caught.value))


def test_declared_where_it_cannot_be_tried() -> None:
    prepared(mk.optimizer.elementwise(picky), PLANS["zero2"])
    with pytest.raises(ValueError, match="changes an element"):  # it was tried, and is not
        prepared(mk.optimizer.elementwise(Lamb), PLANS["zero2"])


# ---------------------------------------------------------------- what the probe cannot examine


class OnGPU(SGD):
    """Steps parameters on a GPU only."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert all(p.is_cuda for _, p, _ in update(self)), "a GPU is wanted"


UNKNOWN: dict[str, tuple[Any, str]] = {
    "on a GPU only": (OnGPU, r"a step of OnGPU fails .*a GPU is wanted.*optimizer=mk\.optimizer\.elementwise\("),
    "whole parameters only": (picky, r"cannot be found out.*AssertionError: whole.*mk\.optimizer\.elementwise\("),
}  # fmt: skip


@pytest.mark.parametrize("what", UNKNOWN)
def test_one_that_cannot_be_examined_is_refused(what: str) -> None:
    optimizer, words = UNKNOWN[what]
    with pytest.raises(ValueError, match=words):
        prepared(optimizer, PLANS["zero2"])


def test_one_that_is_declared_is_taken_at_its_word() -> None:
    """With what could not be looked into."""
    with pytest.warns(
        mk.errors.UnwisePlan, match="OnGPU cannot be tried .*a GPU is wanted.*Whether it repeats itself"
    ):
        prepared(mk.optimizer.elementwise(OnGPU), PLANS["zero1"])


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Embedding(4, 4, sparse=True)))
    data = [(torch.arange(4), torch.zeros(4, 4))]
    with pytest.raises(
        ValueError, match=r"The model's 1\.0 makes sparse.*get_submodule\('1\.0'\)\.sparse = False"
    ):
        prepared(sgd, PLANS["serial"], model, data)


def test_a_hook_on_all_optimizers() -> None:
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(ValueError, match=r"A hook on all optimizers \(<lambda>"):
            prepared(sgd, PLANS["serial"])
    finally:
        handle.remove()
    prepared(sgd, PLANS["serial"])


def test_counts_that_no_checkpoint_has(tmp_path: Any) -> None:
    how = {"checkpoint_every": 1, "checkpoint_dir": tmp_path}
    prepared(AdamW, PLANS["ddp"], **how)
    with pytest.raises(
        ValueError, match=r"Counts changes param_groups\[0\]\['lr'\], count from step to step"
    ):
        prepared(Counts, PLANS["ddp"], **how)
