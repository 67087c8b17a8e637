"""Serial training: one process with the whole model and the whole batch. Every strategy must equal it.

    forward, backward    of all samples at once
    clip                 scale the gradients down to the maximum global norm
    update               of all parameters

In 16 bits the model computes with 16-bit copies of its weights, and the optimizer updates the 32-bit weights
(Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1); the loss is computed in 32 bits, and its
scale, if it has one, is divided out of the gradients (section 3.2).

A run proves itself by this page (`mpkit.proof`), which therefore uses nothing of mpkit.
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
        dtype: `torch.bfloat16` or `torch.float16` for mixed precision; None: the model's own.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(layer.weight)
    >>> serial = Serial(layer, nn.functional.mse_loss, lambda named: torch.optim.SGD(named.values(), lr=0.5))
    >>> value, gradients = serial.gradients(torch.ones(4, 1), torch.zeros(4, 1))
    >>> value.item(), gradients["weight"].item()
    (1.0, 2.0)
    >>> serial.update(0, gradients)
    >>> layer.weight.item()
    0.0
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        optimizer: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer],
        *,
        lr_schedule: Callable[[int], float] | None = None,
        max_grad_norm: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = trained  # what the optimizer updates, by name
        if dtype is not None:
            self.weights = {name: nn.Parameter(p.detach().float()) for name, p in trained.items()}
            model.to(dtype)
        self.model, self.loss, self.dtype = model, loss, dtype
        self.schedule, self.limit = lr_schedule, max_grad_norm
        self.optimizer = optimizer(self.weights)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def gradients(
        self, inputs: Any, targets: Any, scale: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Return the loss of a batch, and its gradient for each trained parameter, by name.

        Args:
            inputs: the model's inputs; a tuple is given by position, a dict by name.
            targets: what the loss compares the outputs with.
            scale: the loss scale.
        """
        self.model.zero_grad()
        # ---- forward
        value = self.loss(self.outputs(inputs), targets)
        if isinstance(value, (tuple, list)):
            total, count = value
            value = total / count
        # ---- backward
        (value * scale).backward()
        found = {name: p.grad for name, p in self.model.named_parameters() if name in self.weights}
        return value.detach(), {
            name: None if grad is None else grad.to(self.weights[name].dtype) / scale
            for name, grad in found.items()
        }

    def outputs(self, inputs: Any) -> Any:
        """Return the model's outputs, for the loss in 32 bits at least."""
        inputs = self._cast(inputs, self.dtype)
        if isinstance(inputs, dict):
            made = self.model(**inputs)
        else:
            made = self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
        return self._cast(made, self.dtype and torch.float32)

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
            if name in self.weights and self.weights[name] is not parameter:
                parameter.copy_(self.weights[name])

    @staticmethod
    def _cast(value: Any, dtype: torch.dtype | None) -> Any:
        def cast(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return value if dtype is None else tree_map(cast, value)
