"""transformers' mixtures of experts, as they are: their experts have the interface that mpkit's have."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.experts.finding import find_experts
from tests.serial import Train, check_equal
from tests.zoo.architectures import ARCHITECTURES, batch_of, build, loss_of

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

ZOO = {one.name: one for one in ARCHITECTURES}
soak = partial(pytest.param, marks=pytest.mark.soak)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("mixtral", mk.Plan(dp=2, tp=2, ep=2)),  # whose own plan divides experts along tp, if ep does not
        ("gpt_oss", mk.Plan(pp=2, dp=2, schedule="1f1b", microbatches=2, ep=2)),  # with biases
        soak("qwen2_moe", mk.Plan(dp=2, zero=3, ep=2)),  # with a shared expert
        soak("qwen3_moe", mk.Plan(cp=2, ep=2)),
        soak("olmoe", mk.Plan(dp=4, ep=4)),
        soak("granite_moe", mk.Plan(dp=4, zero=1, ep=2)),
    ],
)
def test_mixtures_of_transformers_equal_serial_training(train: Train, name: str, plan: mk.Plan) -> None:
    task = ZOO[name].task
    data = [batch_of(task) for _ in range(2)]
    check_equal(
        train, build(ZOO[name]), data, plan,
        steps=2, loss=loss_of(task), optimizer=sgd, microbatches=plan.microbatches,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granite_moe", "gpt_oss", "deepseek_v3"]
)
def test_their_experts_are_found(name: str) -> None:
    """In DeepSeek's first layer is an MLP."""
    layers = len(find_experts(build(ZOO[name])))
    assert layers == 4 - (name == "deepseek_v3")


class Plain(nn.Module):
    """Experts that somebody wrote: two linear maps with biases in a submodule, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), Pair()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).sigmoid().topk(3)
        return x + self.experts(x, routing_weights=weights, selected_experts=chosen)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ParameterDict({"w": torch.randn(4, 6, 6), "b": torch.randn(4, 6)})

    def forward(self, hidden: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
        made = torch.einsum("th,ehf->tef", hidden, self.inner["w"]).tanh() + self.inner["b"]
        taken = made.gather(1, selected_experts[..., None].expand(-1, -1, 6))
        return (taken * routing_weights[..., None]).sum(1)


def test_experts_of_ones_own(train: Train) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Plain(), Plain(), nn.Linear(6, 3)).double()
    data = [(torch.randn(5, 6).double(), torch.randint(3, (5,))) for _ in range(2)]
    plan = mk.Plan(dp=2, zero=2, ep=2)
    check_equal(train, model, data, plan, steps=3, loss=F.cross_entropy, optimizer=sgd, max_grad_norm=0.5)
