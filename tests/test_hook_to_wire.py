"""From an autograd hook to torch.distributed there are few calls; a communicator of some ranks is like that of all."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training

# ---------------------------------------------------------------- from the hook to torch.distributed


def frames_under(hook: str) -> list[str]:
    """The functions from the hook to the caller of this function's caller; none if the hook is not among them."""
    found, frame = [], sys._getframe(2)
    while frame is not None and (not found or found[-1] != hook):
        found.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1] if found[-1] == hook else []


def hook_to_torch(ctx: Any, model: nn.Module, data: Any, plan: mk.Plan, function: str) -> list[list[str]]:
    """The frames of each call of a function of torch.distributed that a hook made in one step."""
    job = prepare(
        copy.deepcopy(model), [data], plan,
        loss=F.mse_loss, optimizer=torch.optim.SGD, steps=1, ranks=plan.ranks,
    )  # fmt: skip
    training, original, found = Training(ctx, job), getattr(dist, function), []

    def watched(*arguments: Any, **how: Any) -> Any:
        found.append(frames_under("_on_grad_ready"))
        return original(*arguments, **how)

    setattr(dist, function, watched)
    try:
        training.step(0)
    finally:
        setattr(dist, function, original)
    return [frames for frames in found if frames]


def test_six_calls_from_the_hook_to_torch(clusters: Callable[[int], mk.Cluster]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    plan = mk.Plan.ddp(2, bucket_mb=1e-4)
    data = torch.randn(6, 8), torch.randn(6, 4)
    for calls in clusters(2).run(hook_to_torch, model, data, plan, "all_reduce"):
        assert calls  # each bucket's
        path = ["_on_grad_ready", "_reduce_full", "_reduce", "start_reduce", "all_reduce", "issue"]
        assert all(frames == path for frames in calls), calls


# ---------------------------------------------------------------- communicators of some of the ranks


def in_pairs(ctx: Any) -> dict[str, Any]:
    pairs = [ctx.comm.group([0, 2]), ctx.comm.group([1, 3])]
    pair, other = pairs[ctx.rank % 2], pairs[1 - ctx.rank % 2]
    again = ctx.comm.group([2, 0])
    mine = torch.tensor([float(ctx.rank)])
    ahead, tag = 1 - pair.index, "F7"
    sent = pair.isend(mine, ahead, tag)
    found = {
        "place": (pair.ranks, pair.size, pair.index, other.index),
        "again": (again.ranks, again is pairs[0]),
        "sum": pair.all_reduce(mine.clone()).tolist(),
        "the same": ctx.comm.all_reduce(mine.clone(), pair, op="mean").tolist(),
        "broadcast": pair.broadcast(mine.clone(), 1).tolist(),
        "global root": ctx.comm.broadcast(mine.clone(), pair.ranks[1], pair).tolist(),
        "gather": pair.gather(mine).tolist(),
        "later": pair.all_gather(mine, async_op=True).wait().tolist(),
        "message": pair.recv(torch.empty(1), ahead, tag).tolist(),
    }
    sent.wait()
    return found


def test_a_group_is_a_communicator(cluster: mk.Cluster) -> None:
    run = cluster.run(in_pairs)
    for rank, found in enumerate(run):
        low, high = (0, 2) if rank % 2 == 0 else (1, 3)
        assert found == {
            "place": ((low, high), 2, rank // 2, -1),
            "again": ((0, 2), False),  # two groups of the same ranks are two groups
            "sum": [low + high],
            "the same": [(low + high) / 2],
            "broadcast": [high],
            "global root": [high],
            "gather": [low, high] if rank == low else [],
            "later": [low, high],
            "message": [low + high - rank],
        }


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda pair: pair.broadcast(torch.ones(1), 2), "rank 2 is not one of.*numbered from 0 to 1"),
        (lambda pair: pair.isend(torch.ones(1), 2), "isend with rank 2: there are ranks 0 to 1"),
        (lambda pair: pair.irecv(torch.ones(1), pair.index), "that is this rank itself"),
    ],
)
def test_ranks_are_those_of_the_communicator(
    cluster: mk.Cluster, call: Callable[[Any], object], says: str
) -> None:
    def wrong(ctx: Any) -> None:
        pairs = [ctx.comm.group([0, 1]), ctx.comm.group([2, 3])]
        call(pairs[ctx.rank // 2])

    with pytest.raises(mk.RankFailed, match=f"(?s)ValueError: .*{says}"):
        cluster.run(wrong)


# ---------------------------------------------------------------- from the training loop to a layer
