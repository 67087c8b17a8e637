"""What the comparison raises: the user's own code, too little memory, and defects of mpkit's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.models.heard_draws import CannotReplay, GivenDraws

Clusters = Callable[[int], mk.Cluster]


def proving() -> bool:
    return threading.current_thread().name == "mpkit-proof"


class Refuses(nn.Module):
    def __init__(self, error: type[Exception], *says: object) -> None:
        super().__init__()
        self.error, self.says = error, says

    def forward(self, x: Tensor) -> Tensor:
        if proving():
            raise self.error(*self.says)
        return x


class WrongShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(3, 3) if proving() else x


class CannotBeCopied(nn.Module):
    def __reduce_ex__(self, protocol: Any) -> Any:
        if proving():
            raise TypeError("a handle cannot be copied")
        return super().__reduce_ex__(protocol)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Optimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if proving():
            raise ArithmeticError("no step here")
        return super().step(closure)


def train(clusters: Clusters, layer: nn.Module, optimizer: Any = torch.optim.SGD) -> str:
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Dropout(0.1), nn.Linear(4, 2))
    data = [(torch.randn(8, 4), torch.randn(8, 2))]
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": lambda p: optimizer(p, lr=0.1), "steps": 2}
    return str(clusters(2).train(model, data, mk.Plan.ddp(2), **how).wait().proof)


FAILS = "not verified: step 1 cannot be repeated: the step fails in plain PyTorch: "


@pytest.mark.parametrize(
    ("layer", "optimizer", "says"),
    [
        (Refuses(KeyError, "key"), torch.optim.SGD, f"{FAILS}KeyError: 'key'"),
        (WrongShape(), torch.optim.SGD, f"{FAILS}RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (CannotBeCopied(), torch.optim.SGD, "equal to serial training in steps 1 and 2"),
        (nn.Identity(), Optimizer, "the update fails in plain PyTorch: ArithmeticError"),
        (Refuses(MemoryError), torch.optim.SGD, "not enough memory to repeat step 1 in this process"),
    ],
    ids=["raises", "shapes", "no copy", "optimizer", "memory"],
)
def test_what_the_users_code_raises_is_said(
    clusters: Clusters, layer: nn.Module, optimizer: Any, says: str
) -> None:
    assert says in train(clusters, layer, optimizer)


@pytest.mark.parametrize(
    "where", ["mpkit.strategies.proof.prover.compare_weights", "mpkit.strategies.proof.draws.shares"]
)
def test_a_defect_is_loud(clusters: Clusters, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Beside the forward, or in the middle of a dropout in it, for which draws are put together."""
    monkeypatch.setattr(where, lambda *_: [][0] if "weights" in where else [])
    with pytest.raises(
        mk.errors.MpkitError, match=r"comparing step 1 .* failed: IndexError.*defect of mpkit"
    ):
        train(clusters, nn.Identity())


def test_a_mask_drawn_inside_a_kernel_cannot_be_given() -> None:
    """The operators of GPUs exist for tensors without content, which is all that is needed here."""
    aten, (q, k, v) = torch.ops.aten, (torch.empty(1, 2, 16, 8, device="meta") for _ in range(3))
    with GivenDraws(lambda shape, p: torch.ones(shape)) as mode:
        assert aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.0)[0].shape == q.shape
        with pytest.raises(CannotReplay, match="efficient_attention draws its dropout mask inside a kernel"):
            aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.1)
    with pytest.raises(CannotReplay, match="_cudnn_rnn draws its dropout mask inside a kernel of the GPU"):
        mode.__torch_dispatch__(aten._cudnn_rnn.default, (), (), {"dropout": 0.5, "train": True})


@pytest.mark.filterwarnings("always")
def test_a_loss_that_broadcasts_is_named_and_nothing_else_is_said(
    clusters: Clusters, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch warns of it, here and on each rank, of the shapes of shares."""
    data = [(torch.randn(8, 4), torch.randn(8))]
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "steps": 1}
    with pytest.raises(
        mk.errors.NotSerial, match=r"shape \[8, 1\] and targets of shape \[8\].*y.view_as\(out\)"
    ):
        clusters(2).train(nn.Linear(4, 1), data, mk.Plan.ddp(2), **how).wait()
    assert "target size" not in "".join(capfd.readouterr())
