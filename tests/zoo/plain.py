"""The training that mpkit is compared with, in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.architectures import Batch

__all__ = ["Trained", "difference", "sgd", "train"]


class Trained(NamedTuple):
    """What came out: a loss a step, and the weights."""

    losses: list[float]
    weights: dict[str, Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Proportional to gradients: a wrong factor shows."""
    return torch.optim.SGD(parameters, lr=0.1)


def train(model: nn.Module, data: list[Batch], loss: Any, parts: int) -> Trained:
    """A step for each batch, which is split into so many parts whose gradients are accumulated."""
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        total = 0.0
        for rows in torch.arange(len(targets)).tensor_split(parts):
            output = model(**{name: x[rows] for name, x in inputs.items()})
            value = loss(output, targets[rows]) * (len(rows) / len(targets))
            value.backward()
            total += value.item()
        optimizer.step()
        losses.append(total)
    return Trained(losses, {name: value.detach() for name, value in model.state_dict().items()})


def difference(a: Trained, b: Trained) -> float:
    """The largest of all losses and weights; infinite where one is not a number, or names differ."""
    if a.weights.keys() != b.weights.keys() or len(a.losses) != len(b.losses):
        return float("inf")
    pairs = [(torch.tensor(a.losses, dtype=torch.float64), torch.tensor(b.losses, dtype=torch.float64))]
    pairs += [(a.weights[name], b.weights[name]) for name in a.weights]
    largest = 0.0
    for x, y in pairs:
        if x.numel():
            found = float((x.double() - y.double()).abs().max())
            largest = max(largest, found if found == found else float("inf"))
    return largest
