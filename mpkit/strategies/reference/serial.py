"""Serial training: one process with the whole model and the whole batch. Every strategy
must equal it.

    forward     of all samples at once
    backward    the gradients of all parameters
    clip        scale the gradients down to the maximum global norm
    update      all parameters

In 16 bits the model computes with copies of the weights, the optimizer updates the
32-bit ones, and the loss and its scale are in 32 bits. A run proves itself by this page
(`mpkit.strategies.proof`), which uses nothing of mpkit itself.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3,
for 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class Serial:
    """A training in one process, step by step.

    Args:
        model: the model; it is trained in place.
        loss: loss(outputs, targets) -> a scalar, the mean over the batch,
            or (total, count).
        optimizer: optimizer(named parameters) -> torch.optim.Optimizer.
        lr_schedule: the factor of the learning rate in step i;
            None: the optimizer's own.
        max_grad_norm: the global norm to which gradients are clipped;
            None: they are not.
        dtype: of mixed precision, in which complex numbers keep theirs;
            None: the model's own.

    >>> serial = Serial(
    ...     nn.Linear(1, 1), nn.MSELoss(),
    ...     lambda named: torch.optim.SGD(named.values(), lr=0.5),
    ... )
    >>> serial.update(0, serial.gradients(torch.ones(4, 1), torch.zeros(4, 1))[1])
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[Any, Any], Any],
        optimizer: Callable[[Any], torch.optim.Optimizer], *,
        lr_schedule: Callable[[int], float] | None = None,
        max_grad_norm: float | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = {
            name: p if dtype is None else _wide(p) for name, p in trained.items()
        }
        self.model = model
        if dtype is not None:
            self.model = model.half() if dtype == torch.float16 else model.bfloat16()
        self.loss, self.dtype, self.limit = loss, dtype, max_grad_norm
        self.schedule, self.optimizer = lr_schedule, optimizer(self.weights)

    def gradients(
        self, inputs: Any, targets: Any, scale: float = 1.0
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of a batch, and its gradients by the parameters' names;
        `scale` is the loss scale.
        """
        self.model.zero_grad()
        # ---- forward
        value = self.loss(self.outputs(inputs), targets)
        value = value[0] / value[1] if isinstance(value, (tuple, list)) else value
        # ---- backward
        (value * scale).backward()
        found = (
            (n, p.grad) for n, p in self.model.named_parameters() if n in self.weights
        )
        return value.detach(), {
            n: g if g is None else g.to(self.weights[n].dtype) / scale for n, g in found
        }

    def outputs(self, inputs: Any) -> Any:
        """Return the model's outputs, for the loss in 32 bits at least."""
        inputs = _cast(inputs, self.dtype)
        args, names = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        made = self.model(*(args if isinstance(args, tuple) else (args,)), **names)
        return _cast(made, self.dtype and torch.float32)

    def update(self, step: int, gradients: Mapping[str, Any]) -> None:
        """Update the weights from gradients, in step number `step`, counted from 0."""
        for name, weight in self.weights.items():
            weight.grad = None if gradients[name] is None else gradients[name].clone()
        # ---- clip
        if self.limit is not None:
            there = [g for g in gradients.values() if g is not None]
            norm = nn.utils.get_total_norm(
                [g.to(torch.promote_types(g.dtype, torch.float64)) for g in there]
            )
            nn.utils.clip_grads_with_norm_(self.weights.values(), self.limit, norm)
        # ---- update
        for group in self.optimizer.param_groups if self.schedule is not None else ():
            initial = group.setdefault("initial_lr", group["lr"])
            group["lr"] = initial * self.schedule(step)
        self.optimizer.step()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights that the optimizer updates into the model."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.weights.get(name, parameter))


def _wide(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(_cast(parameter.detach().clone(), torch.float32))
    made.__dict__.update(parameter.__dict__)  # marks by which an optimizer groups
    return made


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    tensors = () if dtype is None else Tensor

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, tensors) and x.is_floating_point() else x

    return tree_map(cast, value)
