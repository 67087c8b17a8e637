"""Routing that depends on the whole batch, in training by every kind of plan: it equals serial training."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mpkit as mk
from mpkit.models import GPT, MixtureOfExperts, next_token_loss
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.expert_balance import place_experts
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.reference.experts.balance import auxiliary_loss, move_bias, route_with_bias
from mpkit.trace.expert_load import ExpertLoad
from tests.experts.test_expert_parallel import HOW, gpt, texts
from tests.serial import Train, check_equal

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

BIAS = {"bias_rate": 0.02, "z_loss": 0.05, "shared_experts": 1}
"""What works with every schedule."""
ALL = {**BIAS, "aux_loss": 0.5}

PLANS = [
    (mk.Plan(dp=4, ep=2), ALL),
    (mk.Plan(pp=2, schedule="zbv", virtual_stages=2, microbatches=4), BIAS),
    (mk.Plan(pp=2, tp=2), ALL),
]


def test_the_price_of_shared_experts() -> None:
    """Parameters and FLOPs of an estimate are those of the model."""
    sizes = {"vocab": 64, "layers": 2, "width": 32, "heads": 4, "length": 16, "experts": 4}
    hardware = mk.hardware("h100")
    for shared in (0, 2):
        model = GPT(**sizes, shared_experts=shared)
        assert Architecture(
            2, 32, 4, vocabulary=64, positions=16, bias=True, experts=4, top_k=2, shared_ffn=128 * shared
        ).parameters == sum(p.numel() for p in model.parameters())
        answer = mk.fits(model, mk.Plan(dp=2), hardware, global_batch=2, sequence=16)
        assert answer is not None


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "balancing"), PLANS, ids=[repr(plan) for plan, _ in PLANS])
def test_training_equals_serial_training(train: Train, plan: mk.Plan, balancing: dict[str, Any]) -> None:
    run = check_equal(train, gpt(heads=2, **balancing), texts(7, 7), plan, **HOW)
    assert run.proof is not None and str(run.proof).startswith("equal to serial training")


def test_the_losses_are_those_of_the_papers() -> None:
    """Autograd's gradients of alpha E sum f P and of beta mean log^2 sum exp are the ones that the layer adds."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(6, experts=4, top_k=2, aux_loss=0.3, z_loss=0.2).double()
    plain = MixtureOfExperts(6, experts=4, top_k=2).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, 6).double()
    layer(x).square().mean().backward()
    logits = plain.router(x.view(-1, 6))
    p = logits.softmax(-1)
    losses = 0.3 * auxiliary_loss(p, p.topk(2).indices) + 0.2 * logits.logsumexp(-1).square().mean()
    (plain(x).square().mean() + losses).backward()
    torch.testing.assert_close(layer.router.weight.grad, plain.router.weight.grad)


def test_the_bias_is_that_of_the_reference() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(6, experts=4, top_k=2, bias_rate=0.1).double()
    sent: list[Tensor] = []
    layer.experts.register_forward_pre_hook(lambda _, args: sent.append(args[1]))
    bias, x = torch.zeros(4).double(), torch.randn(5, 3, 6).double()
    for _ in range(3):
        layer(x)
        torch.testing.assert_close(layer.bias, bias)
        p = layer.router(x.view(-1, 6)).softmax(-1)
        chosen, _ = route_with_bias(p, bias, 2)
        assert torch.equal(sent.pop(), chosen)
        bias = move_bias(bias, chosen.flatten().bincount(minlength=4), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "balancing", "works"), [
    (mk.Plan(dp=2, microbatches=2), {"aux_loss": 0.1}, "Plan(dp=2)"),
    (
        mk.Plan(pp=2, schedule="1f1b", microbatches=2, tp=2),
        {"aux_loss": 0.1},
        "Plan(pp=2, tp=2, schedule='gpipe', microbatches=2)",
    ),
    (mk.Plan(dp=2, data_parallel="dp"), {"bias_rate": 0.1}, "Plan(dp=2)"),
])  # fmt: skip
def test_plans_that_do_not_see_the_whole_batch(plan: mk.Plan, balancing: dict[str, Any], works: str) -> None:
    """Each is rejected, with a plan that is not."""
    data = [(x.view(-1, 12)[:8], y.view(-1, 12)[:8]) for x, y in texts(12)]
    with pytest.raises(ValueError, match=re.escape(f"What works: {works}") + "$"):
        prepare(gpt(heads=2, length=12, **balancing), data, plan, ranks=plan.ranks, **HOW)
    better: mk.Plan = eval(works, {"Plan": mk.Plan})
    prepare(gpt(heads=2, length=12, **balancing), data, better, ranks=better.ranks, **HOW)


def test_a_loss_that_counts_and_arguments_that_cannot_be() -> None:
    how = {**HOW, "loss": lambda out, y: (next_token_loss(out, y) * y.numel(), (y > 3).sum())}
    with pytest.raises(ValueError, match=r"a count that is known after the last forward\. What works: Plan"):
        prepare(gpt(z_loss=0.1), texts(8), mk.Plan(dp=2), ranks=2, **how)
    prepare(gpt(z_loss=0.1), texts(8), mk.Plan.serial(), ranks=1, **how)
    with pytest.raises(ValueError, match=r"experts=8, aux_loss=0.1"):
        GPT(aux_loss=0.1)
    with pytest.raises(ValueError, match=r"z_loss=0.001"):
        GPT(experts=4, z_loss=-1.0)


# ---- DeepSeek's balancer: the published example, what holds of any placement, and what it says of a run's rows.

EXAMPLE: dict[str, Any] = {
    "weight": [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    "phy2log": [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ],
}
"""Of deepseek-ai/EPLB's README (16 slots, 8 GPUs), and what its code gives without groups."""


def example_load() -> ExpertLoad:
    return ExpertLoad({f"block{i}": np.array([[w]], float) for i, w in enumerate(EXAMPLE["weight"])}, first=0)


def test_the_published_example() -> None:
    assert [place_experts(rows, 16, 8).tolist() for rows in EXAMPLE["weight"]] == EXAMPLE["phy2log"]


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("further", [0, 8, 24])
def test_any_placement_has_all_experts_and_is_no_worse(gpus: int, further: int) -> None:
    for seed in range(6):
        rows = np.random.default_rng(seed).zipf(1.3 + seed / 4, (3, 16)).clip(0, 5000) - 1.0
        load = ExpertLoad({f"block{i}": each[None, None] for i, each in enumerate(rows)}, first=0)
        balance = load.balance(16 + further, gpus)
        for each, given in zip(balance.layers, rows, strict=True):
            assert np.bincount(place_experts(given, 16 + further, gpus), minlength=16).min() >= 1
            assert each.copies.min() >= 1 and each.copies.sum() == 16 + further
            assert each.load_after.max() <= each.load_before.max() and each.load_after.shape == (gpus,)
            assert each.load_after.sum() == pytest.approx(each.load_before.sum()) == given.sum()
        assert balance.time_ratio <= 1 and balance.moves <= 3 * (16 + further)


def test_a_balance_says_what_it_would_do() -> None:
    balance = example_load().balance(16, gpus=8)
    (before, after), *_ = balance.imbalance.values()
    first, second = ([*map(float, layer.load_after)] for layer in balance.layers)
    assert (before, after) == pytest.approx((239 / 129.125, max(first) / 129.125))
    assert balance.time_ratio == pytest.approx((max(first) + max(second)) / (239 + 344))
    placed = balance.layers[0].phy2log
    moved = {(slot // 2, int(e)) for slot, e in enumerate(placed) if e * 8 // 12 != slot // 2}
    assert balance.layers[0].moves == len(moved)
    assert "12 experts in 16 slots of 8 GPUs" in str(
        balance
    ) and f"{balance.time_ratio:.2f} x their time" in str(balance)
    assert "routers choose as in this step" in str(balance)
    assert balance.to_svg().count("<title>expert ") == 2 * (12 + 16)


@pytest.mark.parametrize(("replicas", "gpus", "message"), [
    (13, 4, "replicas=16 would work"),
    (8, 4, "replicas=12 would work"),
    (16, 16, "divided over 1 to 12 GPUs"),
    (16, 0, "divided over 1 to 12 GPUs"),
])  # fmt: skip
def test_numbers_that_do_not_divide_are_rejected_with_ones_that_do(
    replicas: int, gpus: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        example_load().balance(replicas, gpus)
