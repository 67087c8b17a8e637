"""The whole model's loss and gradients on two samples, which those of its shards are compared with.

They are computed in float64, where rounding hides nothing, or in the model's own precision if it computes in no other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpkit.common.exceptions import one_line
from mpkit.strategies.data.microbatch import Value, map_tensors, part
from mpkit.strategies.prepare.arguments.task import Rejection
from mpkit.strategies.stage.stage import call

__all__ = ["Gradients", "WholeModel", "compute_whole", "train", "unknown"]

Loss = Callable[[Any, Any], Any]
Gradients = dict[str, Tensor | None]

CLOSE = 1e-3
"""The relative error of a gradient that may be due to rounding in float64: some models compute parts in float32."""


class WholeModel(NamedTuple):
    """The whole model on two samples.

    Attributes:
        model: the copy that computed them.
        x, y: the samples.
        gradients: its gradients, with the loss under the name "".
        close: the relative error of a gradient that may be rounding.
        least: gradients below this share of the largest one may be nothing but rounding.
    """

    model: nn.Module
    x: Value
    y: Value
    gradients: Gradients
    close: float
    least: float

    def error(self, name: str, gradient: Tensor | None) -> float:
        """Return a gradient's error relative to its largest element, or to the least that counts."""
        expected, scale = self.gradients[name], self.gradients.values()
        if expected is None or gradient is None:
            other = gradient if expected is None else expected
            return 0.0 if other is None or not bool(other.any()) else 1.0
        largest = max(float(grad.abs().max()) for grad in scale if grad is not None and grad.numel())
        size = max(float(expected.abs().max()) if expected.numel() else 0.0, self.least * largest)
        error = float((gradient - expected).abs().max()) if expected.numel() else 0.0
        if error != error:
            return float("inf")
        return error / size if size > 0 else 0.0

    def repeats(self, loss: Loss) -> bool:
        """Return whether the model computes the same again; it may draw random numbers."""
        again = train(self.model, self.x, self.y, loss)
        return max(self.error(name, grad) for name, grad in again.items()) <= self.close


def compute_whole(model: nn.Module, batch: tuple[Value, Value], tp: int, loss: Loss) -> WholeModel:
    """Compute two samples with the whole model, in float64 or else in the model's own precision.

    Raises:
        Rejection: both fail; the message quotes both errors.
    """
    x, y = (part(value, slice(0, 2)) for value in batch)
    precisions = {p.dtype for p in model.parameters() if p.is_floating_point()}
    own = max(precisions, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    failed = []
    for wide in (True, False) if own is not torch.float64 else (True,):
        if wide:
            whole, eps = _noisy(copy.deepcopy(model).to(torch.float64)), torch.finfo(torch.float64).eps
            given = map_tensors(_wide, x), map_tensors(_wide, y)
        else:
            whole, eps, given = _noisy(copy.deepcopy(model)), torch.finfo(own).eps, (x, y)
        close = max(CLOSE, eps**0.5)
        try:
            return WholeModel(whole, *given, train(whole, *given, loss), close, max(1e-6, 10 * eps / close))
        except Exception as error:
            failed.append(f"{'in float64' if wide else 'in its own precision'} {one_line(error)}")
    why = unknown(model, tp, f"it fails in evaluation mode ({'; '.join(failed)})")
    raise Rejection(
        f"{why} What works: tp=1; or a model and a loss that compute two samples of the first batch after model.eval()."
    )


def unknown(model: nn.Module, tp: int, why: str) -> str:
    """Say that a divided model could not be compared with the whole one, and why."""
    return (
        f"Plan(tp={tp}): whether {type(model).__name__}, divided by its TensorPlan, computes what it computes "
        f"whole could not be checked on two samples of the first batch: {why}."
    )


def _noisy(model: nn.Module) -> nn.Module:
    """Add noise to each weight of a model and put it into evaluation mode."""
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
            parameter.add_(drawn.to(parameter.dtype), alpha=0.05)
    return model.eval()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def train(model: nn.Module, x: Value, y: Value, loss: Loss) -> Gradients:
    """Return the gradients, with the loss under the name ""."""
    model.zero_grad()
    with torch.enable_grad():
        value = loss(call(model, map_tensors(torch.clone, x), first=True), map_tensors(torch.clone, y))
        value = value[0] if isinstance(value, tuple) else value  # (total, count)
        value.backward()
    gradients: Gradients = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    gradients[""] = value.detach()
    return gradients
