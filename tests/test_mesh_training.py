"""Meshes of several axes: what they train equals serial training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.run import Run

STEPS = 3


def tokens(batch: int, length: int, vocab: int, steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Random sequences, and what comes next in them."""
    ids = [torch.randint(0, vocab, (batch, length + 1)) for _ in range(steps)]
    return [(x[:, :-1], x[:, 1:]) for x in ids]


Fit = Callable[..., Run]


@pytest.fixture(scope="module")
def fit(train: Callable[..., Run]) -> Fit:
    """`train` with AdamW and clipping, which the norm of all gradients together decides."""

    def run(model: nn.Module, data: Any, plan: mk.Plan, **how: Any) -> Run:
        given = {"loss": next_token_loss, "optimizer": adamw, "steps": STEPS, "max_grad_norm": 0.5}
        return train(model, data, plan, **{**given, **how})

    return run


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def assert_equal(run: Run, serial: Run, rtol: float = 1e-8, atol: float = 1e-10) -> None:
    torch.testing.assert_close(run.losses, serial.losses, rtol=rtol, atol=atol)
    torch.testing.assert_close(run.state_dict(), serial.state_dict(), rtol=rtol, atol=atol)


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    return GPT(vocab=33, layers=3, width=12, heads=3, length=6).double(), tokens(7, 6, 33)


PIPELINES: list[dict[str, Any]] = [
    {"schedule": "gpipe", "microbatches": 2, "recompute": "full"},
    {"schedule": "1f1b", "microbatches": 3},
    {"schedule": "interleaved_1f1b", "microbatches": 2, "virtual_stages": 2},
    {"schedule": "zb_h1", "microbatches": 3},
    {"schedule": "zbv", "microbatches": 2},
]


@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: p["schedule"])
def test_pipelines_with_replicas(fit: Fit, small: Any, pipeline: dict[str, Any], zero: int) -> None:
    model, data = small
    serial = fit(model, data, mk.Plan.serial())
    assert_equal(fit(model, data, mk.Plan(pp=2, dp=2, zero=zero, **pipeline)), serial)


class Embeds(nn.Module):
    """Tokens to vectors; the head's weight is the same one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class Unembeds(Embeds):
    """Vectors to logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_tied_weights_of_pipelines_with_replicas(fit: Fit, zero: int, trained: bool) -> None:
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(11, 6) * 0.1, requires_grad=trained)
    layers = [Embeds(weight), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), Unembeds(weight)]
    model, data = nn.Sequential(*layers).double(), tokens(6, 5, 11)
    serial = fit(model, data, mk.Plan.serial())
    for how in (
        {"pp": 3, "schedule": "1f1b"},
        {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    ):
        run = fit(model, data, mk.Plan(dp=2, zero=zero, microbatches=2, **how))
        assert_equal(run, serial)
    assert torch.equal(run.state_dict()["0.weight"], run.state_dict()["5.weight"])


@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_meshes_equal_serial_training(fit: Fit, data: st.DataObject) -> None:
    draw = data.draw
    pp, dp = draw(st.sampled_from([(1, 3), (2, 2), (3, 2), (2, 4), (4, 2), (2, 3), (4, 1)]))
    schedule = draw(
        st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_h2", "looped_bfs", "interleaved_zb", "dualpipev"])
    )
    v = {"looped_bfs": 2, "interleaved_zb": 2, "dualpipev": 2}.get(schedule, 1)
    m = 2 * pp if schedule in ("dualpipev", "interleaved_zb") else draw(st.integers(1, 4))
    zero = draw(st.integers(0, 3))
    plan = mk.Plan(
        pp=pp, dp=dp, schedule=schedule, virtual_stages=v, microbatches=m, zero=zero,
        recompute=draw(st.sampled_from(["none", "full"])), prefetch=draw(st.integers(0, 2)),
        bucket_mb=draw(st.sampled_from([0.001, 25])), offload=draw(st.sampled_from(["none", "optimizer"])),
    )  # fmt: skip
    torch.manual_seed(draw(st.integers(0, 99)))
    width = draw(st.integers(1, 5))
    layers = [nn.Linear(3, width), nn.Tanh()]
    for _ in range(pp * v):
        layers += [
            nn.Linear(width, width),
            draw(st.sampled_from([nn.Tanh(), nn.LayerNorm(width), nn.ReLU()])),
        ]
    model = nn.Sequential(*layers, nn.Linear(width, 2)).double()
    batch = draw(st.integers(max(m, 3), m * dp + 3))
    batches = [(torch.randn(batch, 3).double(), torch.randn(batch, 2).double()) for _ in range(2)]
    how = {"loss": nn.functional.mse_loss}
    serial = fit(model, batches, mk.Plan.serial(), **how)
    assert_equal(fit(model, batches, plan, **how), serial)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_on_a_mesh_follow_16_bits_alone(fit: Fit, small: Any, precision: str, zero: int) -> None:
    model, data = small
    serial = fit(model.float(), data, mk.Plan.serial(2, precision=precision))
    plan = mk.Plan(pp=2, dp=2, zero=zero, microbatches=2, schedule="1f1b", precision=precision)
    torch.testing.assert_close(fit(model.float(), data, plan).losses, serial.losses, rtol=2e-2, atol=1e-2)
    model.double()


def test_the_norm_of_the_gradients_is_that_of_all(fit: Fit, small: Any) -> None:
    """Clipped so hard that a wrong norm would show in the first update."""
    model, data = small
    how = {"optimizer": sgd, "max_grad_norm": 1e-3, "steps": 1}
    serial = fit(model, data, mk.Plan.serial(), **how)
    for zero in (0, 1):
        plan = mk.Plan(pp=2, dp=2, zero=zero, microbatches=2, schedule="1f1b")
        assert_equal(fit(model, data, plan, **how), serial, rtol=1e-12, atol=1e-14)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)
