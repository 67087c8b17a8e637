"""16 bits, beside 16 bits in plain PyTorch: unusual dtypes, overflows that skip a step, and clipping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk

Clusters = Callable[[int], mk.Cluster]


class Rotary(nn.Module):
    """Turns pairs of features by complex numbers: a buffer that is not trained, and a parameter that is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.factors = nn.Parameter(torch.polar(torch.ones(4), torch.arange(1.0, 5.0)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.first(x).float().unflatten(1, (4, 2)))
        turned = torch.view_as_real(pairs * self.turns * self.factors).flatten(1)
        made: Tensor = self.last(turned.to(self.last.weight.dtype))
        return made


class Mixed(nn.Module):
    """Layers that are in 16 bits as given, and a norm that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(8, 8).bfloat16(),
            nn.LayerNorm(8),
            nn.Linear(8, 4).bfloat16(),
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.first(x.to(self.first.weight.dtype)).to(self.norm.weight.dtype))
        made: Tensor = self.last(normed.to(self.last.weight.dtype))
        return made


class Cast(nn.Module):
    """Computes in bfloat16 under autocast, whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made: Tensor = self.layers(x)
        return made


def plain(
    model: nn.Module, data: Any, loss: Any, dtype: torch.dtype | None, clip: float | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in plain PyTorch with masters of 32 bits and a loss scale for fp16: losses, and the masters afterwards."""
    model = copy.deepcopy(model)
    masters = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    if dtype is not None:
        model = model.half() if dtype == torch.float16 else model.bfloat16()
    optimizer = torch.optim.SGD(masters.values(), lr=0.5)
    scale, losses = 2.0**16 if dtype == torch.float16 else 1.0, []
    for inputs, targets in data:
        model.zero_grad()
        outputs = model(inputs if dtype is None else inputs.to(dtype))
        value = loss(outputs if dtype is None else outputs.float(), targets)
        losses.append(value.item())
        (value * scale).backward()
        for name, p in model.named_parameters():
            masters[name].grad = p.grad.to(masters[name].dtype) / scale
        if not all(bool(master.grad.isfinite().all()) for master in masters.values()):
            scale /= 2
            continue
        if clip is not None:
            nn.utils.clip_grad_norm_(masters.values(), clip)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return losses, {name: master.detach() for name, master in masters.items()}


def steep(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A mean over 15 of 20 targets, whose first scaled gradients are just what fp16 can represent."""
    return lambda outputs, targets: F.cross_entropy(factor * outputs, targets, ignore_index=2)


@pytest.mark.parametrize(
    ("model", "plan", "loss", "clip"),
    [
        (Rotary, mk.Plan.zero(2, 2, precision="bf16"), F.cross_entropy, None),
        (Rotary, mk.Plan(pp=2, microbatches=2, precision="fp16"), F.cross_entropy, None),
        (Rotary, mk.Plan(pp=2, dp=2, zero=1, microbatches=2), F.cross_entropy, 0.05),
        (Mixed, mk.Plan(pp=2, dp=2, zero=1, microbatches=2), F.cross_entropy, 0.05),
        (Mixed, mk.Plan.ddp(2, precision="fp16"), steep(1.5), None),
        (Rotary, mk.Plan.zero(3, 2, precision="fp16", microbatches=2), steep(3.0), None),
        (Cast, mk.Plan.ddp(2, microbatches=2), lambda o, y: 3e3 * F.cross_entropy(o, y), 0.05),
    ],
)
def test_it_is_plain_16_bits(
    clusters: Clusters, model: type[nn.Module], plan: mk.Plan, loss: Any, clip: float | None
) -> None:
    torch.manual_seed(0)
    net = model()
    data = [(torch.randn(20, 8), torch.arange(20) % 4) for _ in range(3)]
    how: dict[str, Any] = {
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.5),
        "steps": 3,
        "max_grad_norm": clip,
    }
    run = clusters(plan.ranks).train(net, data, plan, loss=loss, **how).wait()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision)
    losses, weights = plain(net, data, loss, dtype, clip)
    assert run.losses == pytest.approx(losses, rel=0.02)
    before = {name: parameter.detach() for name, parameter in net.named_parameters()}
    for name, value in run.state_dict().items():
        if name in weights:
            step = float((weights[name] - before[name]).abs().max())
            coarse = float(weights[name].abs().max()) * (torch.finfo(value.dtype).eps)
            assert value.dtype.is_complex == weights[name].dtype.is_complex
            assert float((value - weights[name]).abs().max()) <= 0.1 * step + coarse, name


# ---------------------------------------------------------------- the trained weights


class TiedHead(nn.Module):
    """A model whose first and last layers share a weight, with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Tanh(),
            nn.Linear(8, 8, bias=False),
        )
        self.layers[4].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


@pytest.mark.parametrize(
    "plan",
    [
        mk.Plan(precision="bf16"),
        mk.Plan.ddp(2, precision="bf16"),
        mk.Plan.dp(2, precision="bf16"),
        mk.Plan.zero(1, 2, precision="fp16"),
        mk.Plan.zero(3, 2, precision="bf16", offload="optimizer"),
        mk.Plan(pp=2, dp=2, microbatches=2, zero=1, precision="bf16"),
    ],
    ids=repr,
)
def test_trained_weights_have_32_bits(clusters: Clusters, plan: mk.Plan) -> None:
    """A step of 1e-4 vanishes in bf16 beside weights of 0.3; the masters have it, and so have the weights."""
    torch.manual_seed(0)
    net = TiedHead()
    data = [(torch.randn(8, 8), torch.arange(8))]
    run = (
        clusters(plan.ranks)
        .train(
            net,
            data,
            plan,
            loss=F.cross_entropy,
            optimizer=lambda p: torch.optim.Adam(p, lr=1e-4),
            steps=2,
            ema=0.5,
        )
        .wait()
    )
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
