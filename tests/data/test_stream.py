"""Data that come one batch after the other: read before the start, and trained on as a list would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import mpkit as mk
from mpkit.strategies.prepare import batches as reading
from tests.recipes import sgd

Batch = tuple[Tensor, Tensor]
HOW: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def one_by_one(count: int) -> Iterator[Batch]:
    torch.manual_seed(0)
    for _ in range(count):
        yield torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)


class Samples(IterableDataset[Batch]):
    """Twelve samples, one by one."""

    def __iter__(self) -> Iterator[Batch]:
        return ((x, y) for batch in one_by_one(3) for x, y in zip(*batch, strict=True))


def test_a_generator_and_an_iterable_dataset_train_as_a_list_does(
    clusters: Callable[[int], mk.Cluster],
) -> None:
    losses = []
    for data in (list(one_by_one(3)), one_by_one(99), DataLoader(Samples(), batch_size=4)):
        run = clusters(2).train(net(), data, mk.Plan.ddp(2), steps=3, **HOW).wait()
        assert run.proof.status == "equal"
        losses.append((run.losses, run.data_digest))
    assert losses[0] == losses[1] == losses[2]


def test_too_few_batches_and_too_many_bytes_are_rejected(
    clusters: Callable[[int], mk.Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"the data ended after 4 batches, and 9 steps take 9: steps=4"):
        clusters(2).train(net(), one_by_one(4), mk.Plan.ddp(2), steps=9, **HOW)
    with pytest.raises(ValueError, match="data is empty"):
        clusters(2).train(net(), iter([]), mk.Plan.ddp(2), **HOW)
    monkeypatch.setattr(reading, "MOST_READ", 2**14)
    with pytest.raises(ValueError, match=r"5 of 1,000,000 batches .* mk\.Batches\(dataset, batch_size\)"):
        clusters(2).train(net(), one_by_one(10**6), mk.Plan.ddp(2), steps=10**6, **HOW)
