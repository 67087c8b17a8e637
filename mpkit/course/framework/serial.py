"""Serial training: one device trains on the whole batches, and answers are compared with it.

Everything is made from a case's seed, in float64, so it is the same in every process.

    model      linear layers with tanh between them; `mlp` makes a model that pipelines can cut
    batches    whole batches, one per step; `share` takes the samples of a rank
    train      train on one device
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mpkit.course.framework.exercise import Case

M = TypeVar("M", bound=nn.Module)

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, one row per sample."""

Outcome = dict[str, Any]
"""The results of training that are compared: "losses", one per step, and "weights", by name."""

WIDTHS = (6, 8, 8, 3)


def model(seed: int, widths: Sequence[int] = WIDTHS) -> nn.Sequential:
    """Return linear layers with tanh between them.

    >>> [name for name, _ in model(1).named_parameters()]
    ['0.weight', '0.bias', '2.weight', '2.bias', '4.weight', '4.bias']
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return fill(nn.Sequential(*layers[:-1]), seed)


def mlp(layers: int, seed: int, width: int = 6, *more: nn.Module) -> nn.Sequential:
    """Return linear layers; each is one item with its tanh and whatever more, so that a pipeline can cut there.

    >>> len(mlp(4, seed=1))
    4
    """
    items = (nn.Sequential(nn.Linear(width, width), nn.Tanh(), *more) for _ in range(layers))
    return fill(nn.Sequential(*items), seed)


def fill(module: M, seed: int) -> M:
    """Give every parameter values drawn from a seed, in float64."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.double().parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(draw / parameter.shape[-1] ** 0.5)
    return module


def batches(case: Case, samples: int, steps: int) -> list[Batch]:
    """Return one whole batch per step, (samples, 6) and (samples, 3), of a function that the model can learn."""
    generator = case.generator()
    truth = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    made = []
    for _ in range(steps):
        x = torch.randn(samples, 6, generator=generator, dtype=torch.float64) + 0.3
        made.append((x, torch.tanh(x @ truth)))
    return made


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return a rank's samples of a batch: every n-th one, as the kit scatters them."""
    x, y = batch
    return x[rank::ranks], y[rank::ranks]


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error, a mean over the samples."""
    return nn.functional.mse_loss(outputs, targets)


def sgd(what: nn.Module | Iterable[Tensor]) -> torch.optim.SGD:
    """Return SGD with momentum and weight decay: it exposes what is right for plain SGD or the first step only."""
    return torch.optim.SGD(_parameters(what), lr=0.1, momentum=0.9, weight_decay=0.05)


def adam(what: nn.Module | Iterable[Tensor]) -> torch.optim.Adam:
    """Return Adam with a large eps, so that the size of a step depends on the size of the gradient."""
    return torch.optim.Adam(_parameters(what), lr=0.05, eps=0.05)


def _parameters(what: nn.Module | Iterable[Tensor]) -> Iterable[Tensor]:
    return what.parameters() if isinstance(what, nn.Module) else what


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's parameters as they are now, by name."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of a module's gradients as they are now, by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def outcome(losses: Any, module: nn.Module) -> Outcome:
    """Return the outcome of training: the losses, and the weights of the module."""
    return {"losses": losses, "weights": weights(module)}


def train(
    module: nn.Module,
    data: Sequence[Batch],
    loss: Callable[[Tensor, Tensor], Tensor] = mse,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> Outcome:
    """Train a copy of `module` on one device, with one step per batch."""
    module = copy.deepcopy(module)
    optimize = optimizer(module)
    losses = []
    for x, y in data:
        optimize.zero_grad()
        value = loss(module(x), y)
        torch.autograd.backward(value)
        optimize.step()
        losses.append(value.item())
    return outcome(losses, module)
