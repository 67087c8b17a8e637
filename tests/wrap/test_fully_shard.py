"""mk.fully_shard in a loop of one's own: equal to one process that trains on the whole batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpkit as mk
from mpkit.models import GPT

sys.path.insert(0, str(Path(__file__).parent))
from loops import (
    Toy,
    adamw,
    momentum,
    side_by_side,
)

Clusters = Callable[[int], mk.Cluster]
STAGES = (1, 2, 3)


def equals_serial(ctx: Any, stages: tuple[int, ...]) -> list[float]:
    return [
        side_by_side(ctx, partial(mk.fully_shard, stage=stage), optimizer=optimizer, max_norm=norm)
        for stage in stages
        for optimizer, norm in ((momentum, None), (adamw, 0.5))
    ]


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (3, 4))])
def test_equals_serial_training(clusters: Clusters, ranks: int) -> None:
    for found in clusters(ranks).run(equals_serial, STAGES if ranks == 2 else (3,)):
        assert max(found) < 1e-6, found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def in_16_bits(ctx: Any, precision: str) -> list[Any]:
    found: list[Any] = []
    for stage in STAGES:
        far = side_by_side(ctx, partial(mk.fully_shard, stage=stage, precision=precision), optimizer=sgd)
        torch.manual_seed(0)
        model = mk.fully_shard(Toy(), stage, precision=precision)
        out = model(torch.ones(2, 10))
        (1e-6 * out.sum()).backward()  # would vanish without a scale
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = [None if p.grad is None else p.grad.as_subclass(Tensor) for p in trained]
        found.append(
            (
                far,
                out.dtype,
                {parameter.dtype for parameter in trained},
                {gradient.dtype for gradient in gradients if gradient is not None},
                all(bool((g != 0).any()) for g in gradients if g is not None and g.numel()),
                {value.dtype for value in model.state_dict().values()},
            )
        )
    return found


def test_fp16_has_fp32_master_weights_and_needs_no_scaler(clusters: Clusters) -> None:
    for found in clusters(2).run(in_16_bits, "fp16"):
        for far, out, dtypes, gradients, alive, saved in found:
            assert far < 1e-4
            assert out == torch.float32
            assert dtypes == gradients == saved == {torch.float32}
            assert alive


def overflows(ctx: Any) -> tuple[int, bool, float]:
    torch.manual_seed(0)
    model = mk.fully_shard(nn.Linear(4, 4), 3, precision="fp16")
    before = model.state_dict()
    optimizer = sgd(model.parameters())
    (model(torch.ones(2, 4)).sum() * (float("inf") if ctx.rank else 1.0)).backward()
    optimizer.step()
    unchanged = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    skipped = model.skipped
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return skipped, unchanged, (model.state_dict()["weight"] - before["weight"]).abs().max().item()


def test_an_overflow_on_one_rank_skips_the_step_on_all(clusters: Clusters) -> None:
    for skipped, unchanged, moved in clusters(2).run(overflows):
        assert (skipped, unchanged) == (1, True)
        assert moved == pytest.approx(0.02, rel=1e-2)


# ---------------------------------------------------------------- two modules, second derivatives


def whole(ctx: Any, stage: int, precision: str) -> dict[str, bool]:
    torch.manual_seed(ctx.rank)
    model = mk.fully_shard(Toy(), stage, precision=precision)
    torch.manual_seed(0)
    plain = Toy()
    found = {}
    state = plain.state_dict()
    found["names"] = list(model.state_dict()) == list(state)
    found["state"] = all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with model.summon_full_params():
        found["shapes"] = model.first.weight.shape == (10, 10) and model.module.last.weight.shape == (5, 7)
        with torch.no_grad():
            model.last.weight.fill_(0.5)
    found["written back"] = bool((model.state_dict()["last.weight"] == 0.5).all())
    with model.summon_full_params(writeback=False), torch.no_grad():
        model.norm.weight.clone()
    model.load_state_dict(state)
    found["loaded"] = all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    far = (model(torch.ones(3, 10)) - plain(torch.ones(3, 10))).abs().max().item()
    found["computes"] = far < (1e-6 if precision == "fp32" else 2e-3)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"fixed": state["fixed"]})
    shares = sum(parameter.numel() for parameter in model.parameters())
    found["shares"] = shares < 0.75 * sum(parameter.numel() for parameter in plain.parameters())
    found["not whole now"] = model.last.weight.shape[1:] == (1,)
    return found


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_whole_states_under_the_models_names(clusters: Clusters, precision: str) -> None:
    def every_stage(ctx: Any) -> list[dict[str, bool]]:
        return [whole(ctx, stage, precision) for stage in STAGES]

    for stages in clusters(2).run(every_stage):
        for found in stages:
            assert all(found.values()), found


def changes_by_hand(ctx: Any, stage: int) -> str:
    torch.manual_seed(0)
    model, x = mk.fully_shard(nn.Linear(4, 4), stage), torch.ones(1, 4)
    model(x).sum().backward()
    model.renew()
    before = model(x)
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():  # as an exponential moving average is swapped in
        for parameter in model.parameters():
            parameter.mul_(2.0)
    message = ""
    try:
        assert torch.allclose(model(x), 2 * before)
    except ValueError as error:
        message = str(error)
        model.renew()
        assert torch.allclose(model(x), 2 * before)
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), saved, strict=True):
            parameter.copy_(old)
    model.renew()
    assert torch.allclose(model(x), before)
    return message


def test_parameters_changed_by_hand_are_not_overlooked(clusters: Clusters) -> None:
    for stage in STAGES:
        for message in clusters(2).run(changes_by_hand, stage):
            assert ("model.renew()" in message) == (stage < 3)


MISTAKES = {
    "stage 4": (lambda: mk.fully_shard(nn.Linear(2, 2), 4), r"stage=4\): ZeRO has stage 1"),
    "stage True": (lambda: mk.fully_shard(nn.Linear(2, 2), True), "stage=True"),
    "precision": (lambda: mk.fully_shard(nn.Linear(2, 2), precision="fp8"), "there are 'fp32', 'bf16' and 'fp16'"),
    "twice": (lambda: mk.fully_shard(mk.ddp(nn.Linear(2, 2))), "wrapped already .DataParallel"),
    "ddp around it": (lambda: mk.ddp(mk.fully_shard(nn.Linear(2, 2))), "mk.fully_shard has divided the module"),
    "within it": (
        lambda: mk.fully_shard(nn.Sequential(mk.fully_shard(nn.Linear(2, 2)).module)), "take a rank's parts for"
    ),
    "around parts": (
        lambda: mk.fully_shard(mk.tensor_parallel(GPT(layers=1, width=4, heads=2))), r"mk.Plan\(dp=2, tp=2, zero=3\)"
    ),
    "no parameters": (lambda: mk.fully_shard(nn.ReLU()), "it has no parameters"),
    "a class": (lambda: mk.fully_shard(nn.Linear), "takes a module, and was given type"),
    "zero_optimizer": (
        lambda: mk.zero_optimizer(torch.optim.SGD, mk.fully_shard(nn.Linear(2, 2)).parameters(), lr=1.0),
        "was given shares of mk.fully_shard",
    ),
}  # fmt: skip


def mistaken(_: Any) -> dict[str, str]:
    found = {}
    for name, (mistake, _says) in MISTAKES.items():
        try:
            mistake()
        except ValueError as error:
            found[name] = str(error)
    return found


def test_mistakes_are_explained(clusters: Clusters) -> None:
    for found in clusters(2).run(mistaken):
        assert found.keys() == MISTAKES.keys()
        for name, (_, says) in MISTAKES.items():
            with pytest.raises(ValueError, match=says):
                raise ValueError(found[name])
