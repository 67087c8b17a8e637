"""BatchNorm over all ranks' samples is torch.nn.BatchNorm on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.replicas.batchnorm import Alone, over_whole_batch

EXACT = {"rtol": 1e-10, "atol": 1e-12}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.BatchNorm1d(3),
    "1d of sequences": lambda: nn.BatchNorm1d(3),
    "2d": lambda: nn.BatchNorm2d(3, eps=1e-3, momentum=0.3),
    "3d": lambda: nn.BatchNorm3d(3, momentum=None),
    "not affine": lambda: nn.BatchNorm2d(3, affine=False),
    "not tracking": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "not tracking, evaluating": lambda: nn.BatchNorm2d(3, track_running_stats=False).eval(),
    "evaluating": lambda: nn.BatchNorm2d(3).eval(),
}
INNER = {"1d": (), "1d of sequences": (4,), "3d": (2, 1, 2)}
SHARES = [[0, 3, 6], [1, 4], [2, 5]]  # 7 samples on 3 ranks


def steps(norm: nn.Module, batches: list[Tensor], weights: list[Tensor]) -> list[Any]:
    """Forward and backward of some batches: outputs, gradients, running statistics."""
    found: list[Any] = []
    for x, w in zip(batches, weights, strict=True):
        x = x.clone().requires_grad_()
        y = norm(x)
        (y * w).sum().backward()
        found.append((y.detach(), x.grad))
    return [found, {name: p.grad for name, p in norm.named_parameters()}, norm.state_dict()]


def on_a_rank(ctx: Any, norm: nn.Module, batches: list[Tensor], weights: list[Tensor]) -> list[Any]:
    names = list(norm.state_dict())
    parameters = list(norm.parameters())
    over_whole_batch(norm, ctx.comm)
    assert list(norm.state_dict()) == names
    assert all(a is b for a, b in zip(parameters, norm.parameters(), strict=True))
    mine = SHARES[ctx.rank]
    return steps(norm, [x[mine] for x in batches], [w[mine] for w in weights])


@pytest.mark.parametrize("kind", NORMS)
def test_forward_backward_and_running_statistics(clusters: Callable[[int], mk.Cluster], kind: str) -> None:
    torch.manual_seed(1)
    norm = NORMS[kind]().double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    shape = (7, 3, *INNER.get(kind, (2, 5)))
    batches, weights = ([torch.randn(shape, dtype=torch.float64) + 3 for _ in range(2)] for _ in range(2))
    whole, gradients, state = steps(copy.deepcopy(norm), batches, weights)
    ranks = clusters(3).run(on_a_rank, norm, batches, weights)
    for i, (y, dx) in enumerate(whole):
        for rank, mine in enumerate(SHARES):
            torch.testing.assert_close(ranks[rank][0][i], (y[mine], dx[mine]), **EXACT)
    for name, gradient in gradients.items():
        torch.testing.assert_close(sum(rank[1][name] for rank in ranks), gradient, **EXACT)
    for _, _, found in ranks:
        torch.testing.assert_close(found, state, **EXACT)


# ---------------------------------------------------------------- in training


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("make", [mk.Plan.ddp, mk.Plan.dp])
def test_local_statistics_are_rank_0s(clusters: Callable[[int], mk.Cluster], make: Any) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    data = [(x, torch.randn(8, 2).double())]
    plan = make(2, batchnorm="local")
    run = clusters(2).train(model, data, plan, loss=F.mse_loss, optimizer=sgd, steps=3).wait()
    norm = copy.deepcopy(model[0])
    for _ in range(3):
        norm(x[::2])  # rank 0's samples
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(run.state_dict()[f"0.{name}"], norm.state_dict()[name], **EXACT)


def test_one_value_per_channel_on_all_ranks_together_has_no_variance() -> None:
    norm = nn.BatchNorm1d(3)
    over_whole_batch(norm, Alone())
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        norm(torch.randn(1, 3))
    assert torch.isfinite(norm(torch.randn(2, 3))).all()
