"""Causes planted in real runs on CPU ranks, on a clock that counts FLOPs: the first finding names them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from tests.counted import FREE, counted
from tests.recipes import sgd

STEPS = 3
SLOW, WIRE = (mk.devices.Link("wire", latency, 1e8) for latency in (2e-4, 1e-6))


@pytest.fixture
def cluster(clusters: Callable[[int], mk.Cluster]) -> mk.Cluster:
    return clusters(2)


def chain(widths: list[int]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def samples(count: int, width: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(count, width), torch.randn(count, width))]


def trained(cluster: mk.Cluster, model: nn.Module, data: Any, plan: mk.Plan) -> mk.Trace:
    return cluster.train(model, data, plan, steps=STEPS, loss=F.mse_loss, optimizer=sgd).wait().trace


def kinds(timeline: mk.Timeline, **given: Any) -> list[str]:
    return [finding.kind for finding in timeline.diagnose(**given)]


# ---- trainings --------------------------------------------------------------------------------------------------


def test_a_large_stage(cluster: mk.Cluster) -> None:
    timeline = counted(trained(cluster, chain([32] * 9), samples(64, 32), mk.Plan.gpipe(2, 8, cut=[6])))
    assert kinds(timeline)[0] == "unbalanced stages"
    assert timeline.diagnose()[0].ranks == (0,)


def test_small_collectives_between_layers_are_not_to_be_merged() -> None:
    tokens = torch.zeros(4, 16, dtype=torch.long, device="meta")
    for plan in (mk.Plan.tp(2),):
        trace = mk.trace_fake(
            lambda: GPT(layers=4, width=32, heads=4, length=16), plan, batch=(tokens, tokens), loss=next_token_loss,
            optimizer=sgd, steps=2,
        )  # fmt: skip
        found = counted(trace, SLOW).diagnose(hardware=replace(FREE, link=SLOW))
        small = next(finding for finding in found if finding.kind == "small messages")
        assert "larger micro-batches" in small.remedy and "bucket" not in small.remedy


class Slow(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples that take a while to decode."""

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.001)
        return torch.randn(8), torch.randn(8)


def test_a_slow_loader(cluster: mk.Cluster) -> None:
    trace = trained(cluster, chain([8] * 5), mk.Batches(Slow(), 8), mk.Plan.ddp(2))
    assert kinds(counted(trace))[0] == "data loading"


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


@pytest.mark.soak
def test_a_host_that_does_something_else(cluster: mk.Cluster) -> None:
    def body(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            loss = model(x).square().mean()
            time.sleep(0.02)
            loss.backward()
            time.sleep(0.02)
        optimizer.step()

    assert kinds(mk.Timeline.of(ran(cluster, body), clock="measured"))[0] == "host-bound"


def test_barriers_in_the_loop(cluster: mk.Cluster) -> None:
    def body(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
        rank = torch.distributed.get_rank()
        for number in range(6):
            torch.distributed.barrier()
            model(torch.cat([x, x, x]) if number % 2 == rank else x).square().mean().backward()
        optimizer.step()

    assert kinds(counted(ran(cluster, body), WIRE))[0] == "synchronizing call"
