"""DDP equals serial training, and sends what torch's own DDP sends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.launch.session.run import Run
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training
from tests.serial import Train


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------- parameters that nobody uses


class Forks(nn.Module):
    """Samples that begin with a 1 go another way; `spare` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.spare = (nn.Linear(3, 2).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        ones = x[:, 0] == 1
        if not ones.any():
            return self.left(x)
        return torch.where(ones[:, None], self.right(x), self.left(x))


def forked(*first: int) -> list[tuple[Tensor, Tensor]]:
    x = normal(len(first), 3)
    x[:, 0] = torch.tensor(first)
    return [(x, normal(len(first), 2))]


@pytest.mark.parametrize("make", [mk.Plan.ddp, mk.Plan.dp])
def test_unused_parameters_are_named(train: Train, make: Any) -> None:
    torch.manual_seed(3)
    model = Forks()
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd, "steps": 2}
    for data, names in ((forked(0, 0), "left|right|spare"), (forked(0, 1), "right.weight|spare.weight")):
        with pytest.raises(
            mk.RankFailed, match=rf"No gradient came for ({names}).*unused='allow' in the Plan"
        ):
            train(model, data, make(2), **how)
    model.spare.requires_grad_(False)
    with pytest.raises(
        mk.RankFailed, match=r"rank 0 of 2 failed.*No gradient came for right.weight, right.bias"
    ):
        train(model, forked(0, 1), make(2), **how)


# ---------------------------------------------------------------- what is sent, and when


def wide(layers: int = 4) -> nn.Module:
    """Layers of 1 MiB and a bias each."""
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))


def sent(run: Run, kind: str) -> list[list[int]]:
    """The payloads that rank 0 sent in each step."""
    frame = run.timeline().to_dataframe()
    frame = frame[(frame["rank"] == 0) & (frame["kind"] == kind)]
    return [frame[frame["step"] == step]["bytes"].tolist() for step in range(run.steps)]


def test_buckets_are_those_of_torch(train: Train) -> None:
    torch.manual_seed(5)
    data = [(torch.randn(2, 512), torch.randn(2, 512))]
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": plain_sgd, "steps": 3}
    layer = 2**20 + 512 * 4
    run = train(wide(), data, mk.Plan.ddp(2, bucket_mb=2.5), **how)
    # A bucket is full with 2.5 MiB or more, the first with 1 MiB; in reverse order of the parameters.
    assert sent(run, "all_reduce") == [[layer, 3 * layer]] * 3


# ---------------------------------------------------------------- beside torch's own


def torchs_own(
    ctx: Any, model: nn.Module, data: Any, bucket_mb: float
) -> tuple[dict[str, Tensor], list[int]]:
    """Gradients by torch's DistributedDataParallel, and how many all-reduces each of three iterations took."""
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=bucket_mb)
    calls: list[int] = []

    def mean(bucket: Any) -> Any:
        calls[-1] += 1
        work = torch.distributed.all_reduce(bucket.buffer() / ctx.world_size, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    replica.register_comm_hook(None, lambda _, bucket: mean(bucket))
    inputs, targets = (part[ctx.rank :: ctx.world_size] for part in data)
    for _ in range(3):
        calls.append(0)
        replica.zero_grad()
        F.mse_loss(replica(inputs), targets).backward()
    return {name: p.grad for name, p in replica.module.named_parameters() if p.grad is not None}, calls


def ours(ctx: Any, model: nn.Module, data: Any, plan: mk.Plan) -> dict[str, Tensor]:
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": plain_sgd, "steps": 1, "ranks": plan.ranks}
    training = Training(ctx, prepare(copy.deepcopy(model), [data], plan, **how))
    training.step(0)
    return {piece.name: piece.parameter.grad.clone() for piece in training.sync.pieces}


def both(ctx: Any, model: nn.Module, data: Any, plan: mk.Plan) -> tuple[Any, Any]:
    return torchs_own(ctx, model, data, plan.bucket_mb), ours(ctx, model, data, plan)


def test_gradients_and_calls_are_those_of_torchs_ddp(
    clusters: Callable[[int], mk.Cluster], train: Train
) -> None:
    torch.manual_seed(7)
    model = wide().double()
    data = normal(6, 512), normal(6, 512)
    plan = mk.Plan.ddp(3, bucket_mb=6)
    run = train(model, [data], plan, loss=F.mse_loss, optimizer=plain_sgd, steps=3)
    for (theirs, calls), mine in clusters(3).run(both, model, data, plan):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        # After its first iteration (one bucket of everything) torch's sends as many as ours.
        assert calls == [1, 2, 2]
    assert [len(calls) for calls in sent(run, "all_reduce")] == [2, 2, 2]
