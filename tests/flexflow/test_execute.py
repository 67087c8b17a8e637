"""The strategy found for each layer trains on real ranks as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from examples.flexflow import layer_strategies
from examples.flexflow.chain_search import least_memory, price_choice
from examples.flexflow.layer import Split
from examples.flexflow.result import LayerStrategies
from mpkit.models import GPT
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


def images(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    between = nn.BatchNorm2d(4) if norm else nn.Identity()
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), between, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 16, 4)
    ).double()


def sequences() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4)).double()


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


def with_splits(found: LayerStrategies, seed: int) -> LayerStrategies:
    """The same layers with splits drawn at random, so that all kinds of resharding take place."""
    generator = torch.Generator().manual_seed(seed)
    places = tuple(int(torch.randint(len(s), (), generator=generator)) for s in found.priced.splits)
    return replace(found, choice=price_choice(found.priced.costs, places))


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


@pytest.mark.parametrize(
    ("ranks", "seed"),
    [
        pytest.param(ranks, seed, marks=[] if (ranks, seed) in [(2, 0), (4, 1)] else pytest.mark.soak)
        for ranks in (2, 4)
        for seed in range(4)
    ],
)
def test_any_splits_train_as_one_process_does(clusters: Clusters, ranks: int, seed: int) -> None:
    model = linear_chain()
    found = layer_strategies(model, "8x-a100-nvlink", batch=BATCH, devices=ranks)
    check(with_splits(found, seed), clusters(ranks), model, batches(6))


def test_degrees_that_do_not_divide_each_other(clusters: Clusters) -> None:
    """On 6 ranks parts by halves and by thirds overlap in sixths."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, 3)).double()
    data = [(torch.randn(12, 6).double(), torch.randn(12, 3).double())] * 2
    found = layer_strategies(model, "8x-a100-nvlink", batch=12, devices=6)
    wanted = [Split(sample=2), Split(sample=3), Split(sample=2, parameter=3), Split(parameter=3)]
    places = tuple(splits.index(split) for splits, split in zip(found.priced.splits, wanted, strict=True))
    check(replace(found, choice=price_choice(found.priced.costs, places)), clusters(6), model, data)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_any_splits_of_sequences_and_of_images(clusters: Clusters, seed: int) -> None:
    found = layer_strategies(sequences(), "4x-a100-nvlink", batch=BATCH, sample=(4, 6))
    check(with_splits(found, seed), clusters(4), sequences(), batches(4, 6))
    found = layer_strategies(images(), "4x-a100-nvlink", batch=BATCH, sample=(2, 8, 8), dimensions="SP")
    check(with_splits(found, seed), clusters(4), images(), batches(2, 8, 8))


def test_statistics_over_the_batch_stay_whole(clusters: Clusters) -> None:
    """BatchNorm sees all samples on every rank, while the layers around it are split by samples."""
    model = images(norm=True)
    found = layer_strategies(model, "2x-titan-rtx", batch=BATCH, sample=(2, 8, 8), dimensions="S")
    found = replace(found, choice=found.uniform["sample"])
    assert [each.split.sample for each in found.choices] == [2, 1, 2, 2, 2, 2]
    check(found, clusters(2), model, batches(2, 8, 8))


def test_a_gpt_by_samples(clusters: Clusters) -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=16, heads=2, length=8, vocab=32).double()
    tokens = torch.randint(32, (BATCH, 9))
    data = [(tokens[:, :-1], tokens[:, 1:])] * 2
    loss = mk.models.next_token_loss
    found = layer_strategies(model, "2x-titan-rtx", batch=BATCH, dimensions="S", memory=inf)
    found = replace(found, choice=found.uniform["sample"])
    assert {each.split.sample for each in found.choices} == {2}
    run = found.run(clusters(2), model, data, loss=loss, optimizer=adam)
    losses, weights = serial(model, data, loss=loss, optimizer=adam, steps=2)
    assert run.losses == pytest.approx(losses, rel=1e-8)
    torch.testing.assert_close(run.state_dict, weights, **EXACT)


@pytest.mark.parametrize(
    ("model", "split", "how", "message"),
    [
        (linear_chain(), {}, {"ranks": 4}, r"for 2 devices, and the cluster has 4 ranks: mk\.Cluster\(ranks=2\)"),
        (linear_chain(), {}, {"data": [*batches(6), (torch.zeros(4, 6), torch.zeros(4, 4))]}, r"data\[3\] has 4"),
        (linear_chain(), {}, {"data": []}, "a batch for each step"),
        (linear_chain(), {}, {"model": sequences()}, "layers 0, 1, 2, 3, 4, 5, and this model's differ"),
        (linear_chain(), {"parameter": 2}, {"optimizer": lambda p: Norm(p)}, "Norm is not known to change"),
        (linear_chain(), {}, {"loss": lambda y, t: (y - t).square()}, r"shape \(8, 4\), and not a scalar"),
        (linear_chain(), {}, {"loss": lambda y, t: (F.mse_loss(y, t), 8)}, "is tuple, and not a scalar"),
        (linear_chain(), {}, {"optimizer": adam([torch.ones(1)])}, "is an optimizer already, Adam"),
        (nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)), {}, {}, r"layer '1' draws random numbers.*nn.Dropout\(0.0\)"),
        (nn.Sequential(nn.Linear(6, 4), nn.RReLU()), {}, {}, "layer '1', RReLU, cannot be executed as whole"),
    ],
)  # fmt: skip
def test_what_ranks_cannot_execute_is_refused(
    clusters: Clusters, model: nn.Module, split: dict[str, int], how: dict[str, Any], message: str
) -> None:
    found = layer_strategies(model, "2x-titan-rtx", batch=BATCH)
    if split:
        found = replace(found, choice=found.uniform["parameter"])
    asked = {"model": model, "data": batches(6), "optimizer": adam, "loss": F.mse_loss, **how}
    cluster = clusters(asked.pop("ranks", 2))
    with pytest.raises(ValueError, match=message):
        found.run(cluster, asked.pop("model"), asked.pop("data"), **asked)


class Norm(torch.optim.SGD):
    """Not one of PyTorch's own, and so it may look at whole parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)


def test_what_could_be_executed_instead_is_named_and_can_be(clusters: Clusters) -> None:
    torch.manual_seed(0)
    model = GPT(layers=1, width=16, heads=2, length=8, vocab=32)
    tokens = torch.randint(32, (BATCH, 9))
    data = [(tokens[:, :-1], tokens[:, 1:])]
    found = layer_strategies(model, "2x-titan-rtx", batch=BATCH)
    found = replace(found, choice=found.uniform["parameter"])
    with pytest.raises(ValueError, match=r"layer 'embedding', Embedding, .* as P2.*dimensions='S'\) finds"):
        found.run(clusters(2), model, data, loss=mk.models.next_token_loss, optimizer=adam)
    able = layer_strategies(model, "2x-titan-rtx", batch=BATCH, dimensions="S")
    assert len(able.run(clusters(2), model, data, loss=mk.models.next_token_loss, optimizer=adam).losses) == 1


def test_tied_parameters_are_refused(clusters: Clusters) -> None:
    layer = nn.Linear(6, 6)
    found = layer_strategies(nn.Sequential(layer, layer), "2x-titan-rtx", batch=BATCH)
    with pytest.raises(ValueError, match="two layers share a parameter"):
        found.run(clusters(2), nn.Sequential(layer, layer), batches(6), loss=F.mse_loss, optimizer=adam)
