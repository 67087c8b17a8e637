"""Random numbers that replicas or micro-batches share, told from those that are equal by accident."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mpkit as mk
from mpkit.strategies.proof.draws import SharedDraws, StepDraws


def masks(
    step: int, *, alike: bool, samples: int, width: int, count: int
) -> list[dict[tuple[int, int], list[Tensor]]]:
    """A dropout mask for each of the micro-batches that rank 0 has in a step."""
    drawn = {}
    for m, n in enumerate(samples // count + (m < samples % count) for m in range(count)):
        made = torch.Generator().manual_seed(100 * step if alike else 100 * step + m)
        drawn[0, m] = [torch.empty(n, width).bernoulli_(0.5, generator=made)]
    return [drawn]


def steps_until_found(*, alike: bool, samples: int, width: int, count: int, steps: int) -> int:
    """The first step in which shared draws are found; `steps` if they never are."""
    before: dict[int, float] = {}
    for step in range(steps):
        heard = masks(step, alike=alike, samples=samples, width=width, count=count)
        draws = StepDraws(mk.Plan.serial(count), samples, heard, before=before)
        draws.begin()
        try:
            draws.give((samples, width), 0.5)
        except SharedDraws:
            return step
        before = draws.chances
    return steps


@pytest.mark.parametrize(
    ("samples", "width", "count", "found"),
    [
        (24, 6, 2, 0),  # 72 equal numbers
        (9, 12, 4, 0),  # micro-batches of 3, 2, 2 and 2 samples: three times 24
        (8, 3, 2, 2),  # 12 in each step
    ],
)
def test_equal_draws_add_up_over_parts_and_steps(samples: int, width: int, count: int, found: int) -> None:
    assert steps_until_found(alike=True, samples=samples, width=width, count=count, steps=5) == found


def test_accidents_are_none() -> None:
    assert steps_until_found(alike=False, samples=4, width=1, count=4, steps=300) == 300


def test_one_seed_of_two_replicas_is_found_though_they_draw_few_numbers() -> None:
    heard: list[dict[tuple[int, int], list[Tensor]]] = [{(0, 0): [torch.ones(2)]}, {(0, 0): [torch.ones(2)]}]
    draws = StepDraws(mk.Plan.ddp(2), 4, heard)
    draws.check_places([{(0, 5, 0, 0)}, {(0, 5, 1, 0)}])
    with pytest.raises(SharedDraws, match="the same random numbers for different samples"):
        draws.check_places([{(0, 5, 0, 0)}, {(0, 5, 0, 0)}])
