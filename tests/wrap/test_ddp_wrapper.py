"""mk.ddp in a loop of one's own: equal to one process that trains on the whole batch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mpkit as mk
from mpkit.trace import Kind

sys.path.insert(0, str(Path(__file__).parent))
from loops import Branches

Clusters = Callable[[int], mk.Cluster]


def in_no_sync_nothing_is_sent(ctx: Any) -> tuple[list[str], bool]:
    torch.manual_seed(ctx.rank)
    model = mk.ddp(nn.Linear(10, 5))
    kinds = []
    original = ctx.comm.wire.issue

    def issue(numbered: Any, *arguments: Any, **options: Any) -> Any:
        kinds.append(Kind(numbered.kind).name)
        return original(numbered, *arguments, **options)

    ctx.comm.wire.issue = issue
    with model.no_sync():
        model(torch.full((2, 10), float(ctx.rank))).sum().backward()
    weight = dict(model.named_parameters())["weight"]
    assert weight.grad is not None
    local = bool((weight.grad == 2 * ctx.rank).all())
    model(torch.zeros(2, 10)).sum().backward()
    assert bool((weight.grad == 1).all())  # (0 + 2) / 2
    return kinds, local


def test_no_sync_keeps_gradients_on_the_rank(clusters: Clusters) -> None:
    for kinds, local in clusters(2).run(in_no_sync_nothing_is_sent):
        assert local
        assert kinds.count("ALL_REDUCE") == 1, kinds


def forgets_a_branch(ctx: Any) -> None:
    model = mk.ddp(Branches())
    model(torch.ones(2, 10), "left").sum().backward()


def test_an_unused_parameter_is_named(clusters: Clusters) -> None:
    with pytest.raises(
        mk.RankFailed, match=r"No gradient came for right.weight.*find_unused_parameters=True in mk.ddp"
    ):
        clusters(2).run(forgets_a_branch)


def in_pairs(ctx: Any, how: str) -> list[float]:
    if how == "mesh":
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "dp"))
        group = mesh["dp"]
    else:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = pairs[ctx.rank // 2]
    model = mk.ddp(nn.Linear(1, 1, bias=False), group=group)
    model(torch.full((1, 1), float(ctx.rank))).sum().backward()
    return [parameter.grad.item() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["torch", "mesh"])
def test_a_group_of_ranks(cluster: mk.Cluster, how: str) -> None:
    assert cluster.run(in_pairs, how) == [[0.5], [0.5], [2.5], [2.5]]


MISTAKES = {
    "a context": (lambda ctx: mk.ddp(ctx), "takes a module, and was given Context"),
    "nothing to train": (lambda _: mk.ddp(nn.ReLU()), r"nothing to train \(it has no parameters\)"),
    "all frozen": (lambda _: mk.ddp(nn.Linear(2, 2).requires_grad_(False)), "all of its parameters are frozen"),
    "twice": (lambda _: mk.ddp(mk.ddp(nn.Linear(2, 2))), r"it is wrapped already.*mk.ddp\(wrapped.module\)"),
    "within": (lambda _: mk.ddp(nn.Sequential(mk.ddp(nn.Linear(2, 2)))), "0 in it is wrapped already"),
    "torch's": (
        lambda _: mk.ddp(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))),
        "wrapped already .DistributedDataParallel",
    ),
    "moved": (lambda _: mk.ddp(nn.Linear(2, 2)).double(), r"module.to\(...\) comes before it is wrapped"),
    "copied": (lambda _: copy.deepcopy(mk.ddp(nn.Linear(2, 2))), "cannot be copied or pickled"),
    "assign": (lambda _: mk.ddp(nn.Linear(2, 2)).load_state_dict({}, assign=True), "assign=False"),
    "a wrong group": (lambda _: mk.ddp(nn.Linear(2, 2), group=[0, 1]), "group=.* is list"),
    "an attribute": (lambda _: mk.ddp(nn.Linear(2, 2)).weigth, "has no attribute 'weigth'"),
}  # fmt: skip


def mistaken(ctx: Any) -> dict[str, str]:
    found = {}
    for name, (mistake, _) in MISTAKES.items():
        try:
            mistake(ctx)
        except (ValueError, AttributeError) as error:
            found[name] = str(error)
    return found


def test_mistakes_are_explained(clusters: Clusters) -> None:
    for found in clusters(2).run(mistaken):
        assert found.keys() == MISTAKES.keys()
        for name, (_, says) in MISTAKES.items():
            with pytest.raises(ValueError, match=says):
                raise ValueError(found[name])


def test_outside_of_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"no process group.*init_process_group\(\) comes first"):
        mk.ddp(nn.Linear(2, 2))
