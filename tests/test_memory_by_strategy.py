"""The memory of a model by strategy, beside the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpkit as mk
from mpkit.prediction.experiments.memory_by_strategy import formula, states_of

Clusters = Callable[[int], mk.Cluster]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


@pytest.mark.parametrize(
    ("n", "gigabytes"), [(4, (52.5, 41.3, 30)), (16, (35.6, 21.6, 7.5)), (64, (31.4, 16.6, 1.88))]
)
def test_formulas_are_the_papers(n: int, gigabytes: tuple[float, float, float]) -> None:
    """Table 1 of the ZeRO paper (Rajbhandari et al. 2020): 7.5 B parameters, mixed precision, Adam."""
    for stage, published in zip((1, 2, 3), gigabytes, strict=True):
        held = formula(mk.Plan.zero(stage, n, precision="bf16"), 7_500_000_000, itemsize=2)
        assert sum(held.values()) / 1e9 == pytest.approx(published, rel=5e-3)


def test_states_of_optimizers() -> None:
    assert states_of(adamw) == 2
    assert states_of(lambda params: torch.optim.SGD(params, lr=0.1)) == 0
