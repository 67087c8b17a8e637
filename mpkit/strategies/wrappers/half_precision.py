"""16 bits inside a wrapper: what comes in is cast, what goes out is in 32 bits, and gradients in fp16 are scaled.

    in        floating-point inputs are cast to the precision
    out       outputs are cast to fp32, since a loss is a long sum
    scale     (fp16) gradients of the outputs are multiplied by a power of two, the same on all ranks, which brings the
              largest near 1/8: the mean over many samples would make them vanish otherwise
    unscale   the complete gradients are divided by it, in fp32

So a loop needs no GradScaler. Where a gradient is not finite nevertheless, on any rank, all ranks drop theirs: the
optimizer skips the step, and the next scale is half as large.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2. Their scale is a constant or found by
trial; this one follows the gradients that arrive, since a scale by trial loses its first steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import frexp, isfinite
from typing import Any

import torch
from torch import Tensor

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.stage.stage import PRECISIONS, cast

__all__ = ["Half"]

TARGET = -3
"""Exponent of the power of two below which the largest scaled gradient of the outputs is brought."""


class Half:
    """The borders of a module that computes in 16 bits; in full precision nothing changes.

    Args:
        precision: "full", "bf16" or "fp16".
        replicas: the ranks that share the batch.
        device: this rank's device.

    Attributes:
        scale: factor of the gradients in the backward that is running; 1 unless the precision is fp16.
        skipped: number of backwards whose gradients all ranks dropped.
    """

    def __init__(self, precision: str, replicas: Communicator, device: torch.device) -> None:
        self._dtype = PRECISIONS.get(precision)
        self._scales = precision == "fp16"
        self._replicas, self._device = replicas, device
        self.scale, self._known = 1.0, False
        self._headroom = 0  # how often the scale was halved
        self.skipped = 0

    def begin_backward(self) -> None:
        """Expect the gradients of the outputs, which set the scale."""
        self.scale, self._known = 1.0, False

    # ---- in, out

    def cast_inputs(self, value: Any) -> Any:
        """Return a value with its tensors cast to the precision; their gradients are unscaled."""
        if self._dtype is None:
            return value
        leaves, shape = flatten(value)
        return rebuild(shape, [self._cast(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])

    def _cast(self, tensor: Tensor) -> Tensor:
        if self._scales and tensor.requires_grad and torch.is_grad_enabled():
            tensor = tensor.view_as(tensor)
            tensor.register_hook(lambda gradient: gradient / self.scale)
        cast_one: Tensor = cast(tensor, self._dtype) if self._dtype is not None else tensor
        return cast_one

    def cast_outputs(self, value: Any) -> Any:
        """Return a value with its tensors cast to fp32."""
        return value if self._dtype is None else cast(value, torch.float32)

    def watch(self, output: Any) -> None:
        """Let the gradients of these outputs, which are in fp32, be scaled."""
        if self._scales:
            for tensor in flatten(output)[0]:
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(self._scale_gradient)

    # ---- scale, unscale

    def _scale_gradient(self, gradient: Tensor) -> Tensor:
        if not self._known:  # the first output's gradient sets the scale of this backward
            largest = gradient.detach().abs().max().to(torch.float32).reshape(1)
            value = self._replicas.all_reduce(largest.to(self._device), op="max").item()
            exponent = TARGET - frexp(value)[1] if value > 0 and isfinite(value) else 0
            self.scale, self._known = 2.0 ** (exponent - self._headroom), True
        return gradient * self.scale

    def all_finite(self, gradients: Iterable[Tensor]) -> bool:
        """Return whether all gradients on all ranks are finite; if not, the next scale is half as large."""
        if not self._scales:
            return True
        mine = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        flag = torch.tensor([0.0 if mine else 1.0], device=self._device)
        if self._replicas.all_reduce(flag, op="max").item() == 0.0:
            return True
        self._headroom, self.skipped = self._headroom + 1, self.skipped + 1
        return False
