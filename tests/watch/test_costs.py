"""What a watched program's actions cost: memory beside torch.profiler's, FLOPs beside their formula."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import mpkit as mk
from benchmarks.allocator import Peak, peak_of
from mpkit.trace import Kind
from tests.watch import programs

BATCH, WIDTH, BLOCKS = 2048, 64, 4
MATRICES = BLOCKS * 2 * 4 * WIDTH * WIDTH + WIDTH * 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def larger(ctx: Any, program: FunctionType) -> list[float]:
    """The program with a model and a batch of some megabytes."""

    def mlp() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 8))

    def batch(seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(BATCH, WIDTH), torch.randint(0, 8, (BATCH,))

    program.__globals__.update(mlp=mlp, batch=batch)  # those of the rank's copy
    losses: list[float] = program()
    return losses


def profiled(ctx: Any, program: FunctionType) -> Peak:
    """The peak of torch's allocator while the program runs."""
    return peak_of(lambda: larger(ctx, program))


@pytest.mark.parametrize(
    "program",
    [
        programs.ddp,
        *[
            pytest.param(program, marks=pytest.mark.soak)
            for program in (programs.fsdp2, programs.fsdp1, programs.zero_optimizer, programs.pipeline)
        ],
    ],
    ids=lambda program: program.__name__,
)
def test_peak_memory_is_the_profilers(program: Any, clusters: Callable[[int], mk.Cluster]) -> None:
    cluster = clusters(2)
    peaks = cluster.run(profiled, program)
    cluster.run(larger, program, watch=True)
    for peak, held in zip(peaks, cluster.timeline().peak_memory, strict=True):
        assert abs(peak.off(held["total"])) <= 0.03


def test_memory_is_counted_by_category(clusters: Callable[[int], mk.Cluster]) -> None:
    clusters(2).run(larger, programs.ddp, watch=True)
    size = 4 * (MATRICES + BLOCKS * 5 * WIDTH + 8)
    for held in clusters(2).timeline().peak_memory:
        assert (held["params"], held["grads"], held["optimizer"]) == (size, size, 0)
    clusters(2).run(larger, programs.fsdp2, watch=True)
    for held in clusters(2).timeline().peak_memory:
        assert (held["params"], held["grads"], held["optimizer"]) == (size // 2, size // 2, size)


def test_flops_of_every_step_are_those_of_the_formula(clusters: Callable[[int], mk.Cluster]) -> None:
    clusters(2).run(larger, programs.ddp, watch=True)
    ops = clusters(2).trace.ranks[0].ops
    actions = ops[ops["depth"] == 0]
    forward = 2 * BATCH * MATRICES
    unneeded = 2 * BATCH * WIDTH * 4 * WIDTH  # the gradient of the batch
    for step in range(programs.STEPS):
        these = actions[actions["step"] == step]
        assert these["flops"][these["kind"] == Kind.FORWARD].tolist() == [forward]
        assert these["flops"][these["kind"] == Kind.BACKWARD].tolist() == [2 * forward - unneeded]


def keeps_more_than_it_trains(ctx: Any) -> None:
    whole = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    dataset = torch.zeros(100, 64)
    optimizer = torch.optim.SGD(whole[0].parameters(), lr=0.1)
    for _ in range(3):
        whole[0](dataset[:2]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_was_made_before_the_first_action_is_held(clusters: Callable[[int], mk.Cluster]) -> None:
    cluster = clusters(1)
    cluster.run(keeps_more_than_it_trains, watch=True)
    (held,) = cluster.timeline().peak_memory
    assert held["params"] == 2 * 64 * 64 * 4
    assert held["buffers"] == 100 * 64 * 4
