"""The strategy found for each layer trains on real ranks as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from examples.flexflow import layer_strategies
from examples.flexflow.chain_search import least_memory
from examples.flexflow.result import LayerStrategies
from tests.serial import EXACT, serial

Clusters = Callable[[int], mk.Cluster]
BATCH = 8


def linear_chain() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.Linear(16, 8, bias=False),
        nn.GELU(),
        nn.Linear(8, 12),
        nn.Linear(12, 4),
    )
    return nn.Sequential(*layers).double()


def batches(*shape: int, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    targets = (*shape[:-1], 4) if len(shape) < 3 else (4,)
    return [
        (
            torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64),
            torch.randn(BATCH, *targets, generator=generator, dtype=torch.float64),
        )
        for _ in range(steps)
    ]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def check(
    found: LayerStrategies, cluster: mk.Cluster, model: nn.Module, data: list[tuple[Tensor, Tensor]]
) -> None:
    losses, weights = serial(model, data, loss=F.mse_loss, optimizer=adam, steps=len(data))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run = found.run(cluster, model, data, loss=F.mse_loss, optimizer=adam)
    splits = [str(each.split) for each in found.choices]
    assert run.losses == pytest.approx(losses, rel=1e-8), splits
    assert list(run.state_dict) == list(weights)
    for name, value in weights.items():
        torch.testing.assert_close(
            run.state_dict[name], value, **EXACT, msg=lambda m, n=name: f"{splits} {n}: {m}"
        )
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_strategy_found_trains_as_one_process_does(clusters: Clusters, ranks: int) -> None:
    model = linear_chain()
    for hardware in ("8x-a100-nvlink", "4x-titan-rtx"):
        check(
            layer_strategies(model, hardware, batch=BATCH, devices=ranks),
            clusters(ranks),
            model,
            batches(6),
        )
    found = layer_strategies(model, "8x-a100-nvlink", batch=BATCH, devices=ranks)
    fitted = found.again(memory=1.1 * least_memory(found.priced.costs).memory)
    assert max(each.split.parameter for each in fitted.choices) > 1  # memory asks for divided parameters
    check(fitted, clusters(ranks), model, batches(6))


def test_what_ranks_send_is_what_is_priced(clusters: Clusters) -> None:
    """Under data parallelism: gradients in all-reduces, and the output that every rank computes the loss from."""
    model, steps = linear_chain(), 3
    found = layer_strategies(model, "4x-a100-nvlink", batch=BATCH)
    found = replace(found, choice=found.uniform["sample"])
    run = found.run(clusters(4), model, batches(6, steps=steps), loss=F.mse_loss, optimizer=adam)
    parameters = sum(layer.parameters for layer in found.priced.layers)
    sent = {"all_reduce": 8 * parameters * steps, "all_gather": 8 * BATCH * 4 * steps}
    assert mk.Timeline.of(run.trace).comm_bytes == [sent] * 4
