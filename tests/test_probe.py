"""The probe: what is wrong in parts is refused before a rank starts, by kind and by name; and nothing else is."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpkit as mk
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.prepare.prepare import prepare

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


def prepared(model: nn.Module, data: Any, plan: mk.Plan, loss: Any = F.mse_loss) -> TrainJob:
    return prepare(model, data, plan, ranks=plan.ranks, loss=loss, steps=2, optimizer=sgd)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def masked_mean(out: Tensor, y: Any) -> Tensor:
    return ((out - y[0]).square() * y[1]).sum() / y[1].sum()


def by_hand(out: Tensor, y: Tensor) -> Tensor:
    valid = y != -100
    return -(out.log_softmax(-1).gather(1, y.clamp(min=0)[:, None])[:, 0] * valid).sum() / valid.sum()


SOME = torch.arange(8)[:, None] < torch.tensor([8, 6, 3, 1])
LOSSES = {
    "a sum": (lambda out, y: (out - y).square().sum(), Y, "is a sum.*len(y) / 8"),
    "of a batch of 8": (lambda out, y: (out - y).square().sum() / 8, Y, "is a sum"),
    "a masked mean": (masked_mean, (Y, SOME), "mean over something else than samples.*(total, count)"),
    "masks that are floats": (masked_mean, (Y, SOME.double()), "mean over something else.*(total, count)"),
    "ignored targets": (by_hand, CLASSES.masked_fill(CLASSES == 3, -100), "ignore_index.*mk.mean_loss("),
    "a spread": (
        lambda out, y: F.mse_loss(out, y) + out.std(),
        Y,
        "needs the whole batch.*mk.whole_batch_loss(",
    ),
    "a root": (lambda out, y: F.mse_loss(out, y).sqrt(), Y, "needs the whole batch"),
    "contrastive": (
        lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(out))),
        Y,
        "needs the whole batch",
    ),
    "broadcast": (lambda out, y: F.mse_loss(out[:, :1], y[:, 0]), Y + X, "needs the whole batch"),
}


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_refused_by_their_kind(name: str, plan: mk.Plan) -> None:
    loss, targets, message = LOSSES[name]
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        prepared(net(), [(X, targets)], plan, loss)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(
    ("loss", "targets"),
    [(masked_mean, (Y, torch.ones(8, 4, dtype=torch.bool))), (by_hand, CLASSES), (F.huber_loss, Y)],
    ids=["mask of ones", "no target is masked", "elementwise"],
)
def test_what_would_be_wrong_for_other_data_is_not_refused(loss: Any, targets: Any, plan: mk.Plan) -> None:
    assert prepared(net(), [(X, targets)], plan, loss).what.nominal is None


def test_later_batches_of_a_list_are_looked_at() -> None:
    later = CLASSES.clone()
    later[5] = -100
    with pytest.raises(ValueError, match=r"ignore_index=-100.*data\[1\]"):
        prepared(net(), [(X, CLASSES), (X, later)], PLANS[0], by_hand)


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


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / len(gradient))
    return x


LAYERS = {
    "the batch's mean": Fn(lambda x: x - x.mean(0)),
    "its length": Fn(lambda x: x * len(x)),
    "a permutation": Fn(lambda x: x + 0.1 * x[torch.randperm(len(x))]),
    "another permutation": Fn(lambda x: x + 0.1 * x[torch.rand(len(x)).argsort()]),
    "a softmax over it": Fn(lambda x: x * x.softmax(0)),
    "a little of its neighbour": Fn(lambda x: x + 1e-4 * x.roll(1, 0)),
    "an average that it keeps": Average(used=True),
}


@pytest.mark.parametrize("plan", [mk.Plan.ddp(2), mk.Plan.gpipe(2, 4), mk.Plan.dp(2)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_look_at_the_batch_are_refused_by_name(name: str, plan: mk.Plan) -> None:
    with pytest.raises(ValueError, match=r"The layer '1' .*other samples"):
        prepared(net(LAYERS[name]), [(X, Y)], plan)


def test_a_gradient_that_looks_at_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The gradient of 0\.weight depends on which samples"):
        prepared(net(Fn(hooked)), [(X, Y)], PLANS[0])


def test_what_nobody_depends_on_is_warned_of() -> None:
    with pytest.warns(mk.errors.UnwisePlan, match="The buffer '1.mean' depends on which samples"):
        prepared(net(Average(used=False)), [(X, Y)], PLANS[0])


class Mixture(nn.Module):
    """Each sample goes to the expert that it likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        best = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out[best == i] = expert(x[best == i])
        return out + 0.0 * self.gate(x).sum(-1, keepdim=True)


class Single(nn.Module):
    """RMSNorm that computes in float32 whatever it is given, as transformers' do."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


class NumpyNoise(nn.Module):
    """Draws that torch knows nothing of."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + np.random.rand()) if self.training else x


HARMLESS = {
    "dropout": nn.Dropout(0.5),
    "noise": Fn(lambda x: x + torch.randn_like(x)),
    "numpy's noise": NumpyNoise(),
    "stochastic depth": Fn(lambda x: x * (torch.rand(len(x), 1) < 0.5)),
    "batch norm": nn.BatchNorm1d(4),
    "layer norm": nn.LayerNorm(4),
    "instance norm": nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2), nn.Flatten()),
    "experts": Mixture(),
    "float32 inside": Single(),
    "checkpointed": Fn(lambda x: checkpoint(torch.tanh, x, use_reentrant=False)),
    "a permutation of features": Fn(lambda x: x[:, torch.randperm(4)]),
}


@pytest.mark.parametrize(
    "plan", [mk.Plan.ddp(2, unused="allow"), mk.Plan.gpipe(2, 2, batchnorm="local")], ids=str
)
@pytest.mark.parametrize("name", HARMLESS)
def test_what_sees_each_sample_by_itself_is_not_refused(name: str, plan: mk.Plan) -> None:
    prepared(net(copy.deepcopy(HARMLESS[name])), [(X, Y)], plan)


def test_the_probe_leaves_everything_as_it_was() -> None:
    calls = [0]

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            calls[0] += 1
            return F.mse_loss(out, y) * self.weight.detach().double().sum()

    model, loss = net(nn.BatchNorm1d(4), nn.Dropout(0.3)), Counting()
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    prepared(model, [(X, Y)], PLANS[0], loss)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in (*model.parameters(), *loss.parameters()))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_computes_its_loss_is_looked_into() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4).double()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.layer(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def its_own(out: dict[str, Tensor], y: Tensor) -> Tensor:
        return out["loss"]

    masked = CLASSES.masked_fill(CLASSES == 2, -100)
    for plan in (mk.Plan.ddp(2), mk.Plan.serial(2)):
        prepared(WithLoss(), [({"x": X, "labels": CLASSES}, CLASSES)], plan, its_own)
        later = [({"x": X, "labels": labels}, labels) for labels in (CLASSES, masked)]
        for data in (later, later[1:]):
            with pytest.raises(ValueError, match=r"computed within the model.*mk\.mean_loss"):
                prepared(WithLoss(), data, plan, its_own)


@pytest.mark.parametrize(
    ("plan", "message"),
    [(mk.Plan.gpipe(2, 2), "2 micro-batches"), (mk.Plan.cp(2), "part of every sequence")],
    ids=str,
)
def test_a_loss_of_the_whole_batch_is_refused_where_it_cannot_be(plan: mk.Plan, message: str) -> None:
    tokens = torch.zeros(4, 8, dtype=torch.long)
    model = mk.models.GPT(vocab=8, width=8, layers=2, heads=2, length=8)
    loss = mk.whole_batch_loss(mk.models.next_token_loss)
    with pytest.raises(ValueError, match=message):
        prepared(model, [(tokens, tokens)], plan, loss)


def test_a_loss_that_looks_at_neighbours_is_refused_where_sequences_are_cut() -> None:
    tokens = torch.randint(0, 8, (4, 8))
    model = mk.models.GPT(vocab=8, width=8, layers=2, heads=2, length=8)

    def shifted(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out[:, :-1].flatten(0, 1), y[:, 1:].flatten())

    with pytest.raises(ValueError, match="looks at a token's neighbours"):
        prepared(model, [(tokens, tokens)], mk.Plan.cp(2), shifted)
