"""Tensor parallelism: forward, loss and gradients on real ranks are those of the whole model on one."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, MLP, next_token_loss
from mpkit.parallel.axis import Axis
from mpkit.parallel.shard import put_together
from mpkit.parallel.tensor import shard_model

# Ranks get this module's functions by value, and need not import the module and what tests need.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Clusters = Callable[[int], mk.Cluster]
EXACT = {"rtol": 1e-8, "atol": 1e-10}
WAYS = [{"sequence": sequence, "overlap": overlap} for sequence in (False, True) for overlap in (False, True)]


def called(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def on_a_rank(ctx: Any, model: nn.Module, inputs: Any, targets: Tensor, loss: Any, how: Any) -> Any:
    """Loss, gradients and shards of one rank."""
    line = Axis(ctx.comm)
    sharded = shard_model(model, line, **how)
    value = loss(called(model, inputs), targets)
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    for name in sorted(sharded.partial):
        line.all_reduce(gradients[name])
    return value.item(), gradients, sharded.shards


def check_equal(
    clusters: Clusters, t: int, model: nn.Module, inputs: Any, targets: Tensor, loss: Any, **how: Any
) -> None:
    whole = copy.deepcopy(model)
    value = loss(called(whole, inputs), targets)
    value.backward()
    ranks = clusters(t).run(on_a_rank, model, inputs, targets, loss, how)
    for found, _, _ in ranks:
        assert found == pytest.approx(value.item(), rel=1e-10)
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        mine = [(shards[name], gradients[name]) for _, gradients, shards in ranks if name in shards]
        found = [gradients[name] for _, gradients, _ in ranks]
        if mine:
            found = [put_together([shard for shard, _ in mine], [gradient for _, gradient in mine])]
        for gradient in found:
            torch.testing.assert_close(gradient, parameter.grad, **EXACT, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("t", [2, 3])
def test_gpt(clusters: Clusters, t: int, how: Any) -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=20, heads=5, vocab=31, length=12).double()
    tokens = torch.randint(31, (3, 13))
    check_equal(clusters, t, model, tokens[:, :-1], tokens[:, 1:], next_token_loss, **how)


@pytest.mark.parametrize("layers", [1, 4, 5])
def test_mlp(clusters: Clusters, layers: int) -> None:
    torch.manual_seed(1)
    model = MLP(3, 5, width=17, layers=layers).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 5).double()
    check_equal(clusters, 3, model, x, y, F.mse_loss)
