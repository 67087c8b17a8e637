"""transformers' mixtures of experts, as they are: their experts have the interface that mpkit's have."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.experts.divide import find_experts
from mpkit.strategies.reference.experts.balance import auxiliary_loss
from tests.serial import Train, check_equal, same, serial
from tests.zoo.architectures import ARCHITECTURES, batch_of, build, loss_of

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

ZOO = {one.name: one for one in ARCHITECTURES}
soak = partial(pytest.param, marks=pytest.mark.soak)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        soak("mixtral", mk.Plan(dp=2, tp=2, ep=2)),  # whose own plan divides experts along tp, if ep does not
        soak("mixtral", mk.Plan(dp=2, tp=2, ep=2, etp=2, zero=1)),
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


class WithRouters(nn.Module):
    """A mixture that returns what its routers said, samples first, so that an auxiliary loss can see it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(
            replace(ZOO["mixtral"], settings=ZOO["mixtral"].settings | {"output_router_logits": True})
        )

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inner(input_ids=input_ids, use_cache=False)
        said = [each.unflatten(0, input_ids.shape) for each in out.router_logits]
        return out.logits, torch.stack(said, 2)  # [batch, time, layers, experts]


def with_auxiliary_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, said = outputs
    p = said.flatten(0, 1).softmax(-1)
    chosen = p.topk(2).indices
    losses = [auxiliary_loss(p[:, layer], chosen[:, layer]) for layer in range(p.shape[1])]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * sum(losses)


def test_an_auxiliary_loss_sees_the_whole_batch(train: Train) -> None:
    """Computed in parts it would be another loss, and is rejected; `whole_batch_loss` gathers what the routers said."""
    data = [(torch.randint(40, (6, 8)), torch.randint(40, (6, 8))) for _ in range(2)]
    how: dict[str, Any] = {"steps": 3, "optimizer": sgd}
    model, plan = WithRouters(), mk.Plan(dp=2, ep=2)
    with pytest.raises(
        mk.errors.NotSerial,
        match=r"(?s)The loss needs the whole batch.*loss=mk.whole_batch_loss\(your_loss\)",
    ):
        train(model, data, plan, loss=with_auxiliary_loss, **how)
    losses, weights = serial(model, data, loss=with_auxiliary_loss, **how)
    run = train(model, data, plan, loss=mk.whole_batch_loss(with_auxiliary_loss), **how)
    same(run, losses, weights, rtol=1e-7, atol=1e-9)  # transformers' routers compute in 32 bits
