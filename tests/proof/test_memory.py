"""Steps that depend on earlier ones: branches, modes, and what model and loss remember in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.proof.rounding import RoundingMode
from mpkit.trace.proof import Proof

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

Clusters = Callable[[int], mk.Cluster]
DDP = mk.Plan.ddp(2, unused="allow")


def train(clusters: Clusters, model: nn.Module, plan: mk.Plan, loss: Any = F.mse_loss, **how: Any) -> Proof:
    made = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 4, generator=made), torch.randn(8, 2, generator=made)) for _ in range(8)]
    given: dict[str, Any] = {
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.1),
        "steps": 8,
        "verify": (1, 2, 6),
    }
    return clusters(plan.ranks).train(model, data, plan, loss=loss, **given | how).wait().proof


class Branch(nn.Module):
    """From the fifth forward on, `late` is used, or is not used any more; `drop` leaves training mode."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.first, self.late, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.first(x)
        if self.kind == ("begins" if self.calls > 4 else "ends"):
            y = y + self.late(x)
        if self.kind == "mode" and self.calls > 4:
            self.drop.eval()
        made: Tensor = self.last(self.drop(torch.tanh(y)))
        return made


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("begins", "late.weight gets a gradient for the first time in step 5"),
        ("ends", "late.weight gets no gradient for the first time in step 5"),
        ("mode", "drop is in evaluation mode for the first time in step 5"),
    ],
)
def test_what_happens_first_in_a_step_that_was_not_compared(clusters: Clusters, kind: str, says: str) -> None:
    proof = train(clusters, Branch(kind), DDP, verify=(1,))
    assert says in proof.why_not or "the forward computes add for the first time in step 5" in proof.why_not
    assert proof.why_not.endswith("train(..., verify=(5,)) compares that step")
    proof = train(clusters, Branch(kind), mk.Plan.zero(3, 2, unused="allow"), verify=(1, 5))
    assert (proof.steps, proof.why_not) == ((1, 5), ""), "the branch depends on a counter in Python"
    assert train(clusters, Branch(kind), DDP, verify=(1, 7)).why_not == "", "a later step has the same"


class Annealed:
    """A loss whose factor grows with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(outputs, targets) * min(1.0, self.calls / 5)


def annealed() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.mse_loss(outputs, targets) * min(1.0, calls / 5)

    return loss


@pytest.mark.parametrize("loss", [Annealed, annealed])
def test_a_loss_that_counts_its_calls(clusters: Clusters, loss: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    for plan in (DDP, mk.Plan.gpipe(2, 1)):
        assert train(clusters, model, plan, loss()).steps == (1, 2, 6)
    with pytest.raises(
        mk.errors.NotSerial, match=r"remembers something from one forward to the next.*a step has 2 of them"
    ):
        train(clusters, model, mk.Plan.serial(2), loss())


@pytest.mark.parametrize("name", ["BatchNorm1d", "InstanceNorm1d"])
def test_roundings_leave_the_updates_of_running_statistics(name: str) -> None:
    x = torch.randn(8, 4, 16)
    rounded, exact = (getattr(nn, name)(4, track_running_stats=True) for _ in range(2))
    exact(x)
    with RoundingMode(0):
        rounded(x)
    for got, wanted in zip(rounded.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(got, wanted)
