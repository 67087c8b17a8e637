"""The memory of a model by strategy, beside the formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import mpkit as mk
from mpkit.data import spirals
from mpkit.models import MLP
from mpkit.prediction.experiments.memory_by_strategy import MODEL_STATES, MemoryByStrategy, formula, states_of

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


@pytest.fixture(scope="module")
def measured(clusters: Clusters) -> MemoryByStrategy:
    torch.manual_seed(0)
    plans = [mk.Plan.dp(2), mk.Plan.ddp(2), *(mk.Plan.zero(stage, 2) for stage in (1, 2, 3))]
    return mk.memory_by_strategy(
        MLP(2, 3, width=16, layers=3), spirals(8, 2), plans,
        loss=F.cross_entropy, optimizer=adamw, clusters=clusters,
    )  # fmt: skip


def test_it_is_a_table_and_pictures(measured: MemoryByStrategy, tmp_path: Path) -> None:
    table = measured.to_dataframe()
    assert table["strategy"].tolist()[::2] == measured.strategies
    assert {"params", "params_formula", "activations", "total"} <= set(table)
    assert len(str(measured).splitlines()) == 13
    svg = measured.to_svg(tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").read_text() == svg
    assert svg.count("<title>params: ") == 10
    figure = measured.figure()
    assert [trace.name for trace in figure.data[:3]] == list(MODEL_STATES)
    assert list(figure.data[0].y) == table["params"].tolist()
    assert list(figure.data[-1].y) == [sum(row.formula.values()) for row in measured.rows]
    bundle = measured._repr_mimebundle_()
    assert "data:image/svg+xml" in bundle["text/html"] or "plotly" in str(bundle)
