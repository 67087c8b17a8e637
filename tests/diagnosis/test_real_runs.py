"""Causes planted in real runs on CPU ranks, on a clock that counts FLOPs: the first finding names them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpkit as mk
from tests.counted import counted

STEPS = 3
SLOW, WIRE = (mk.devices.Link("wire", latency, 1e8) for latency in (2e-4, 1e-6))


@pytest.fixture
def cluster(clusters: Callable[[int], mk.Cluster]) -> mk.Cluster:
    return clusters(2)


def chain(widths: list[int]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def kinds(timeline: mk.Timeline, **given: Any) -> list[str]:
    return [finding.kind for finding in timeline.diagnose(**given)]


# ---- programs of one's own, watched ------------------------------------------------------------------------------


def ran(
    cluster: mk.Cluster, body: Callable[[nn.Module, Tensor, torch.optim.Optimizer], None], width: int = 64
) -> mk.Trace:
    def run(ctx: Any) -> None:
        model = chain([width] * 5)
        x, optimizer = torch.randn(32, width), torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            body(model, x, optimizer)
            mk.watch.step()

    cluster.run(run, watch=True)
    return cluster.trace


def reduced(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        torch.distributed.all_reduce(parameter.grad)


def test_work_that_one_rank_does_more(cluster: mk.Cluster) -> None:
    def body(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
        y = model(x if torch.distributed.get_rank() else torch.cat([x, x, x]))
        y.square().mean().backward()
        reduced(model)
        optimizer.step()

    trace = ran(cluster, body)
    found = counted(trace).diagnose()
    assert found[0].kind == "straggler" and found[0].ranks == (0,)
    for each in (counted(trace), mk.Timeline.of(trace), mk.Timeline.of(trace, clock="measured")):
        path = each.critical_path()
        recorded = path.graph.end - path.graph.begin
        assert path.graph.ends == pytest.approx(recorded, abs=1e-3 * path.step_time)
        assert sum(op.seconds for op in path.ops) == pytest.approx(path.step_time)


def test_gradients_that_are_reduced_at_the_end(cluster: mk.Cluster) -> None:
    def body(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
        model(x).square().mean().backward()
        reduced(model)
        optimizer.step()

    assert kinds(counted(ran(cluster, body), WIRE))[0] == "late bucket"


def test_barriers_in_the_loop(cluster: mk.Cluster) -> None:
    def body(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
        rank = torch.distributed.get_rank()
        for number in range(6):
            torch.distributed.barrier()
            model(torch.cat([x, x, x]) if number % 2 == rank else x).square().mean().backward()
        optimizer.step()

    assert kinds(counted(ran(cluster, body), WIRE))[0] == "synchronizing call"
