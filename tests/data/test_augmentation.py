"""Datasets that change their samples at random give the same ones on any ranks and workers, and others each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import mpkit as mk
from mpkit.launch.session.run import Run

SAMPLES, BATCH = 12, 6


class Transform:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, x: Tensor) -> Tensor:
        return x + float(self.generator.random())


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Adds one number of each generator to a sample; the target knows which."""

    def __init__(self) -> None:
        self.transforms = [Transform()]
        self.torch, self.python = torch.Generator(), random.Random(0)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        drawn = [
            torch.rand(()).item(), torch.rand((), generator=self.torch).item(), random.random(),
            self.python.random(), np.random.rand(),
        ]  # fmt: skip
        x = self.transforms[0](torch.tensor(drawn, dtype=torch.float64))
        return x, x.sum()[None]


def test_a_sample_draws_the_same_whoever_reads_it_and_others_each_time() -> None:
    batches = mk.Batches(Noisy(), BATCH)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = batches[0][0]
    assert torch.equal(first[1::2], batches.part(0, slice(1, None, 2))[0])
    drawn = torch.cat([batches[step][0] for step in range(4)])
    for column in drawn.T:
        assert column.unique().numel() == 4 * BATCH  # no two samples, and no epochs, draw the same
    assert not torch.equal(first, mk.Batches(Noisy(), BATCH, seed=1)[0][0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.parametrize(
    ("plan", "workers"),
    [
        (mk.Plan.ddp(2, microbatches=2), 2),
        (mk.Plan.gpipe(2, 2), 0),
    ],
    ids=str,
)
def test_augmented_training_equals_a_plain_loop(
    train: Callable[..., Run], plan: mk.Plan, workers: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "steps": 5}
    losses = train(model, mk.Batches(Noisy(), BATCH, num_workers=workers), plan, **how).losses
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), mk.Batches(Noisy(), BATCH)
    for step, loss in enumerate(losses):
        x, y = batches[step]
        optimizer.zero_grad()
        expected = F.mse_loss(model(x), y)
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), abs=1e-12)
