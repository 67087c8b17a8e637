"""ZeRO-1 with optimizers that need whole parameters: each parameter's states are on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.replicas.flat import assign_owners
from mpkit.trace import Kind
from tests.serial import Train, check_equal


class Orthogonal(torch.optim.Optimizer):
    """Muon in the precision of its parameters: momentum, made orthogonal; vectors by their sign."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                if p.dim() != 2:
                    p.sub_(momentum.tanh(), alpha=group["lr"])
                    continue
                x = momentum / (momentum.norm() + 1e-7)
                for _ in range(5):  # Newton and Schulz
                    x = 1.5 * x - 0.5 * x @ x.mT @ x
                p.sub_(x, alpha=group["lr"])


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab=17, layers=2, width=8, heads=2, length=6).double()


def tokens() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(17, (8, 6)), torch.randint(17, (8, 6))) for _ in range(3)]


PLANS = [
    mk.Plan(dp=4, zero=1, dp_shard=2),
    mk.Plan(pp=2, dp=2, zero=1, schedule="1f1b", microbatches=2),
    mk.Plan(dp=2, zero=1, cp=2, offload="optimizer"),
]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_muon_by_owner_is_serial_training(train: Train, plan: mk.Plan) -> None:
    run = check_equal(
        train, gpt(), tokens(), plan, loss=next_token_loss, optimizer=Orthogonal, steps=3, max_grad_norm=0.5
    )
    ratios = [row.ratio for row in run.timeline().comm_volume().rows if row.symbols == "k (n-1)"]
    assert ratios == pytest.approx([1, 1])


def test_owners_hold_the_states_and_send_to_all(train: Train) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2, bias=False)).double()
    data = [(torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64))]
    run = train(model, data, mk.Plan.zero(1, 2), loss=F.mse_loss, optimizer=Orthogonal, steps=2)
    # ---- 32, 8 and 16 elements: rank 0 owns the first weight, rank 1 the others
    assert [rank["optimizer"] for rank in run.timeline().peak_memory] == [32 * 8, 24 * 8]
    sent = [
        int(op["bytes"]) for op in run.trace.ranks[0].ops
        if op["kind"] in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER) and op["step"] == 1
    ]  # fmt: skip
    assert sent == [2 * 32 * 8] * 2  # n k: shards are as large as that of the rank with most


def test_a_checkpoint_goes_from_owners_to_others_and_back(train: Train, tmp_path: Path) -> None:
    how: dict[str, Any] = {"loss": next_token_loss, "optimizer": Orthogonal}
    expected = train(gpt(), tokens(), mk.Plan.ddp(2), steps=6, **how).state_dict()
    saving = {"checkpoint_every": 2, "checkpoint_dir": tmp_path}
    train(gpt(), tokens(), mk.Plan.zero(1, 4), steps=2, **saving, **how)
    train(gpt(), tokens(), mk.Plan.ddp(2), steps=4, resume_from=tmp_path, **saving, **how)
    run = train(gpt(), tokens(), mk.Plan.zero(1, 2), steps=6, resume_from=tmp_path, **how)
    for name, value in run.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-10)


def test_the_largest_first_to_the_rank_with_least() -> None:
    assert assign_owners([3, 5, 5, 1, 2], 3) == [2, 0, 1, 0, 2]
