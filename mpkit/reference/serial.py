"""Serial training: one process with the whole model and the whole batch. Every strategy must equal it.

    forward     of all samples at once
    backward    the gradients of all parameters
    clip        scale the gradients down to the maximum global norm
    update      all parameters

In 16 bits the model computes with copies of the weights, the optimizer updates the 32-bit ones, and the loss and its
scale are in 32 bits. A run proves itself by this page (`mpkit.proof`), which therefore uses nothing of mpkit.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3, for 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = ["Serial"]


class Serial:
    """A training in one process, step by step.

    Args:
        model: the model; it is trained in place.
        loss: loss(outputs, targets) -> a scalar, the mean over the batch, or (total, count).
        optimizer: optimizer(named parameters) -> torch.optim.Optimizer.
        lr_schedule: the factor of the learning rate in step i; None: 1.
        max_grad_norm: the global norm to which gradients are clipped; None: they are not.
        dtype: of mixed precision; None: the model's own.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(layer.weight)
    >>> serial = Serial(layer, nn.functional.mse_loss, lambda named: torch.optim.SGD(named.values(), lr=0.5))
    >>> value, gradients = serial.gradients(torch.ones(4, 1), torch.zeros(4, 1))
    >>> serial.update(0, gradients)
    >>> value.item(), gradients["weight"].item(), layer.weight.item()
    (1.0, 2.0, 0.0)
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[Any, Any], Any], optimizer: Callable[[Any], torch.optim.Optimizer], *,
        lr_schedule: Callable[[int], float] | None = None, max_grad_norm: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = trained  # what the optimizer updates, by name
        if dtype is not None:
            self.weights = {name: _wide(p) for name, p in trained.items()}
            model.to(dtype)
        self.model, self.loss, self.dtype = model, loss, dtype
        self.schedule, self.limit = lr_schedule, max_grad_norm
        self.optimizer = optimizer(self.weights)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def gradients(self, inputs: Any, targets: Any, scale: float = 1.0) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of a batch, and its gradients by the parameters' names; `scale` is the loss scale."""
        self.model.zero_grad()
        # ---- forward
        value = self.loss(self.outputs(inputs), targets)
        if isinstance(value, (tuple, list)):
            total, count = value
            value = total / count
        # ---- backward
        (value * scale).backward()
        found = {name: p.grad for name, p in self.model.named_parameters() if name in self.weights}
        wide = {name: g if g is None else g.to(self.weights[name].dtype) / scale for name, g in found.items()}
        return value.detach(), wide

    def outputs(self, inputs: Any) -> Any:
        """Return the model's outputs, for the loss in 32 bits at least."""
        inputs = _cast(inputs, self.dtype)
        by_place = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
        made = self.model(*by_place, **(inputs if isinstance(inputs, dict) else {}))
        return _cast(made, self.dtype and torch.float32)

    def update(self, step: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Update the weights from gradients, in step number `step`, counted from 0."""
        for name, weight in self.weights.items():
            gradient = gradients[name]
            weight.grad = None if gradient is None else gradient.clone()
        # ---- clip
        if self.limit is not None:
            nn.utils.clip_grad_norm_(self.weights.values(), self.limit)
        # ---- update
        if self.schedule is not None:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * self.schedule(step)
        self.optimizer.step()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights that the optimizer updates into the model."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.weights.get(name, parameter))


def _wide(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(parameter.detach().float())
    made.__dict__.update(parameter.__dict__)  # marks by which an optimizer groups
    return made


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return value if dtype is None else tree_map(cast, value)
