"""Never silently wrong: a random training equals plain PyTorch, or is refused or stopped.

Losses, optimizers, layers, hooks and data are drawn from `tests/ingredients.py`, and a plan; what is trained serially
in plain PyTorch is the whole batch at once.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mpkit as mk
from tests.ingredients import (
    BATCH,
    CLASSES,
    DATA,
    HOOKS,
    LAYERS,
    LOSSES,
    OPTIMIZERS,
    ORDINARY,
    PLANS,
    WIDTH,
    Pairs,
)

STEPS = 3


def make_model(layers: list[str], hook: str, seed: int) -> nn.Sequential:
    """Return linear layers of float64 with the drawn layers between them, hooked."""
    torch.manual_seed(seed)
    between = [LAYERS[name]() for name in layers]
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *between, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    ).double()
    HOOKS[hook](model)
    return model


def make_pairs(masked: str, seed: int) -> Pairs:
    """Return a batch per step; `masked`: the steps whose targets are masked for more than one part of the batch."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for step in range(STEPS):
        inputs = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)
        targets = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        if masked == "all" or (masked == "last" and step == STEPS - 1):
            targets[BATCH // 2 - 1 :] = -100
        pairs.append((inputs, targets))
    return pairs


def whole_batch_training(
    model: nn.Module, pairs: Pairs, loss: Any, optimizer: str
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in plain PyTorch; return the losses by step and the weights afterwards."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    made = OPTIMIZERS[optimizer](named if optimizer == "by name" else [p for _, p in named])
    losses = []
    for inputs, targets in pairs:
        value = loss(model(inputs), targets)
        if isinstance(value, tuple):
            value = value[0] / value[1]
        made.zero_grad()
        value.backward()
        made.step()
        losses.append(value.item())
    return losses, copy.deepcopy(model.state_dict())


def is_ordinary(drawn: set[str]) -> bool:
    """Return whether every plan trains these ingredients."""
    # An optimizer by the number of parameters differs with and without the frozen ones, so it is asked which is meant.
    return drawn <= ORDINARY and not {"frozen", "by number"} <= drawn


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a training: mostly ordinary ingredients, so that each odd one is met by itself."""

    def one(table: dict[str, Any]) -> str:
        ordinary = [name for name in table if name in ORDINARY]
        return draw(st.one_of(st.sampled_from(ordinary), st.sampled_from(list(table))))

    return {
        "layers": [one(LAYERS) for _ in range(draw(st.integers(1, 2)))],
        "hook": one(HOOKS),
        "loss": one(LOSSES),
        "optimizer": one(OPTIMIZERS),
        "data": one(DATA),
        "masked": draw(st.sampled_from(["none", "none", "all", "last"])),
        "plan": draw(st.sampled_from(list(PLANS))),
        "seed": draw(st.integers(0, 99)),
    }


@pytest.mark.soak
@pytest.mark.timeout(1200)
@settings(max_examples=200)
@given(case=cases())
def test_a_training_equals_plain_pytorch_or_is_refused(
    clusters: Callable[[int], mk.Cluster], case: dict[str, Any]
) -> None:
    plan, loss = PLANS[case["plan"]](), LOSSES[case["loss"]]()
    pairs = make_pairs(case["masked"], case["seed"])
    optimizer = OPTIMIZERS[case["optimizer"]]
    drawn = {*case["layers"], *(case[key] for key in ("hook", "loss", "optimizer", "data"))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a plan may be unwise, a loss NaN; torch warns of some hooks
        try:
            run = clusters(plan.ranks).train(
                make_model(case["layers"], case["hook"], case["seed"]), DATA[case["data"]](pairs), plan,
                loss=loss, optimizer=mk.optimizer.by_name(optimizer) if case["optimizer"] == "by name" else optimizer,
                steps=STEPS,
            )  # fmt: skip
        except ValueError as refused:
            assert not is_ordinary(drawn), f"refused, though all of it is ordinary: {refused}"
            return
        try:
            run.wait()
        except (mk.errors.NotSerial, mk.RankFailed) as stopped:
            assert not is_ordinary(drawn), f"stopped, though all of it is ordinary: {stopped}"
            return
        losses, weights = whole_batch_training(
            make_model(case["layers"], case["hook"], case["seed"]), pairs, loss, case["optimizer"]
        )
    assert run.losses == pytest.approx(losses, rel=1e-8, abs=1e-10, nan_ok=True)
    for name, value in run.state_dict().items():
        torch.testing.assert_close(
            value, weights[name], rtol=1e-8, atol=1e-10, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
