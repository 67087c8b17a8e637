"""mk.fully_shard(reshard_after_forward=s): hpZ, whose backward gathers from shards among s neighbouring ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpkit as mk
from mpkit.trace import Kind

sys.path.insert(0, str(Path(__file__).parent))
from loops import Toy, adamw, apart, data, mine, models, momentum, side_by_side

Clusters = Callable[[int], mk.Cluster]
PSI = 3 * 8 * 8 * 4
"""Bytes of a Chain's weights."""


class Chain(nn.Module):
    """Three layers, computed again in the backward if asked."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers, self.again = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False).tanh() if self.again else layer(x).tanh()
        return x


def accumulates(ctx: Any, parts: int) -> float:
    """Accumulate gradients over parts of a batch, evaluate between steps, and change weights by hand."""
    module, plain = models(ctx)
    model = mk.fully_shard(module, reshard_after_forward=2)
    x, y = data()
    optimizer, its = adamw(model.parameters()), adamw(plain.parameters())
    worst = 0.0
    for _ in range(3):
        optimizer.zero_grad()
        its.zero_grad()
        F.mse_loss(plain(x), y).backward()
        for part_x, part_y in zip(mine(ctx, x).chunk(parts), mine(ctx, y).chunk(parts), strict=True):
            (F.mse_loss(model(part_x), part_y) / parts).backward()
        its.step()
        optimizer.step()
        with torch.no_grad():
            worst = max(worst, (model(x) - plain(x)).abs().max().item())
        with model.summon_full_params(), torch.no_grad():
            model.module.last.weight.mul_(0.9)
        with torch.no_grad():
            plain.last.weight.mul_(0.9)
        worst = max(worst, apart(model, plain))
    return worst


def trains(ctx: Any) -> list[float]:
    wrap = partial(mk.fully_shard, reshard_after_forward=2)
    how: list[dict[str, Any]] = [{"optimizer": adamw, "max_norm": 0.5}, {"optimizer": momentum}]
    return [side_by_side(ctx, wrap, Toy, **each) for each in how] + [
        accumulates(ctx, parts) for parts in (1, 2)
    ]


def test_equals_serial_training(clusters: Clusters) -> None:
    for found in clusters(4).run(trains):
        assert max(found) < 1e-6, found


def in_bf16(ctx: Any, reshard: Any) -> list[float]:
    torch.manual_seed(0)
    model = mk.fully_shard(Toy(), precision="bf16", reshard_after_forward=reshard)
    optimizer, losses = adamw(model.parameters()), []
    x, y = data()
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.mse_loss(model(mine(ctx, x)), mine(ctx, y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_in_16_bits_it_is_zero_3_to_the_bit(clusters: Clusters) -> None:
    assert clusters(4).run(in_bf16, 2) == clusters(4).run(in_bf16, True)


def sends(ctx: Any, again: bool, m: int) -> float:
    torch.manual_seed(0)
    model = mk.fully_shard(Chain(again), reshard_after_forward=2)
    optimizer = momentum(model.parameters())
    for step in range(2):
        with ctx.record.step(step):
            optimizer.zero_grad()
            for _ in range(m):
                model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    return float(ctx.record.ledger.held["params"])


@pytest.mark.parametrize(("again", "m"), [(False, 1), (True, 2)])
def test_a_backward_gathers_among_neighbours(clusters: Clusters, again: bool, m: int) -> None:
    """A step sends m psi (n-1)/n among all n, and m psi (s-1)/s among s; a rank holds psi/n + psi/s."""
    cluster = clusters(4)
    held = cluster.run(sends, again, m)
    timeline = cluster.timeline()
    spans = timeline.spans[(timeline.spans["step"] == 1) & (timeline.spans["rank"] == 3)]
    gathers = np.sort(spans[spans["kind"] == Kind.ALL_GATHER], order="issued")
    assert [timeline.names[group] for group in gathers["group"]] == m * (["0,1,2,3"] * 3 + ["2,3"] * 3)
    wire = {row.kind: row.wire for row in timeline.comm_volume().rows}
    assert wire["all_gather"] == m * PSI * 3 / 4 + m * PSI / 2 and wire["reduce_scatter"] == m * PSI * 3 / 4
    assert set(held) == {PSI / 4 + PSI / 2}


def message(make: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="reshard_after_forward") as caught:
        make()
    return str(caught.value)


def mistaken(ctx: Any) -> list[str]:
    wrap = mk.fully_shard
    return [
        message(lambda: wrap(nn.Linear(2, 2), reshard_after_forward=3)),
        message(lambda: wrap(nn.Linear(2, 2), reshard_after_forward=4)),
        message(lambda: wrap(nn.Linear(2, 2), reshard_after_forward=1)),
        message(lambda: wrap(nn.Linear(2, 2), 2, reshard_after_forward=2)),
        message(lambda: wrap(nn.Linear(2, 2), reshard_after_forward=False)),
        message(lambda: wrap(nn.Linear(2, 2), dp_shard=2, reshard_after_forward=2)),
    ]


def test_mistakes_are_explained(clusters: Clusters) -> None:
    found = clusters(4).run(mistaken)[0]
    for said in found[:3]:
        assert "the 4 ranks are divided into several groups" in said and "reshard_after_forward=2;" in said
    assert "Either stage=3" in found[3] and "With stage=2" in found[4] and "dp_shard=2" in found[5]
