"""A small model and its batches, for exercises that train: another one for every case, the same on all ranks.

What ranks train is compared to what `trained` does with all of their samples on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from mpkit.classroom.exercise import Case

__all__ = ["adam", "batches", "network", "parameters", "trained", "whole_batches"]

Batch = tuple[Tensor, Tensor]


def network(case: Case, *widths: int) -> nn.Sequential:
    """Linear layers of these widths with tanh between them, in float64.

    >>> sum(p.numel() for p in network(Case(2), 3, 4, 2).parameters())
    26
    """
    layers: list[nn.Module] = []
    generator = case.generator(777)
    for before, after in pairwise(widths):
        linear = nn.Linear(before, after, dtype=torch.float64)
        with torch.no_grad():
            for parameter in linear.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn / before**0.5)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batches(case: Case, rank: int, steps: int, rows: int, inputs: int, outputs: int) -> list[Batch]:
    """A rank's part of each step's batch: x (rows, inputs), y (rows, outputs)."""
    generator = case.generator(rank)
    return [
        (
            torch.randn(rows, inputs, generator=generator, dtype=torch.float64),
            torch.randn(rows, outputs, generator=generator, dtype=torch.float64) + rank,
        )
        for _ in range(steps)
    ]


def whole_batches(case: Case, steps: int, rows: int, inputs: int, outputs: int) -> list[Batch]:
    """The batches of all ranks, put together."""
    of_ranks = [batches(case, rank, steps, rows, inputs, outputs) for rank in range(case.ranks)]
    return [
        (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        for parts in zip(*of_ranks, strict=True)
    ]


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Adam with an eps that is large, so that a gradient of another size makes another step."""
    return torch.optim.Adam(parameters, lr=0.05, eps=0.05)


def trained(
    model: nn.Module,
    steps: Sequence[Batch],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = adam,
) -> list[Tensor]:
    """The parameters after training on one device; the model is left as it is."""
    model = copy.deepcopy(model)
    stepper = optimizer(model.parameters())
    for x, y in steps:
        stepper.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        stepper.step()
    return parameters(model)


def parameters(model: nn.Module) -> list[Tensor]:
    """Copies of a model's parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]
