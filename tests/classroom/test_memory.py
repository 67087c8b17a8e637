"""What an answer holds is counted, by category, and a host's memory is apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpkit as mk
from mpkit.course.framework.memory import Host, Memory
from mpkit.course.framework.room import Room
from mpkit.strategies.rank_context import Context


def categories(ctx: Context) -> list[dict[str, int]]:
    held = ctx.record.ledger.held
    model = nn.Linear(8, 4, bias=False)
    with Memory(ctx, model.parameters()):
        optimizer = torch.optim.Adam(model.parameters())
        kept = model(torch.ones(2, 8))
        found = [dict(held)]
        kept.sum().backward()
        del kept
        found.append(dict(held))
        optimizer.step()
        found.append(dict(held))
        optimizer.zero_grad()
        found.append(dict(held))
    return found


def on_the_host(ctx: Context) -> tuple[dict[str, int], str]:
    with Memory(ctx) as memory:
        host = Host(ctx, memory)
        weight = host.put(torch.zeros(8))
        optimizer = torch.optim.Adam([weight])
        weight.grad = host.put(torch.ones(8))
        optimizer.step()
        held = dict(ctx.record.ledger.held)
        try:
            weight + torch.ones(8)
        except RuntimeError as error:
            return held, str(error)
    return held, ""


@pytest.fixture
def cluster(room: Room) -> mk.Cluster:
    return room.cluster(1)


def test_categories(cluster: mk.Cluster) -> None:
    ((forward, backward, stepped, dropped),) = cluster.run(categories)
    assert [forward[name] for name in ("params", "grads", "optimizer")] == [128, 0, 0]
    assert forward["activations"] >= 32
    assert [backward[name] for name in ("params", "grads", "optimizer")] == [128, 128, 0]
    assert [stepped[name] for name in ("params", "grads", "optimizer")] == [128, 128, 256]
    assert [dropped[name] for name in ("params", "grads", "optimizer")] == [128, 0, 256]


def test_the_host_is_another_device(cluster: mk.Cluster) -> None:
    ((held, error),) = cluster.run(on_the_host)
    assert held["optimizer"] == held["grads"] == 0
    assert "same device" in error
