"""16 bits, beside 16 bits in plain PyTorch: unusual dtypes, overflows that skip a step, and clipping."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk

Clusters = Callable[[int], mk.Cluster]


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
        mk.Plan.dp(2, precision="bf16"),
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
