"""Overlap: the gradient of a region's input is reduced while the gradients of its weights are computed.

y = x W^T has two gradients: dx = dy W, which has to be summed over the ranks, and dW = dy^T x, which does not. So all
column layers of a region are one node in autograd's graph, made when the first of them is called; the others take
their output. Its backward:

    dx         of all column layers: dx = sum_i dy_i W_i
    start      the sum of dx over the ranks: all-reduce, or reduce-scatter where the sequence is divided
    weights    meanwhile dW_i = dy_i^T x
    wait       for the sum

Where x is divided by sequence, only this rank's part [b, s/t, h] is kept for the backward, and gathered again for dW
while dx is computed. So a layer keeps s b h (34/t + 5 a s/(h t)) bytes: Korthikanti et al. 2022,
section 4.2.2 and equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpkit.strategies.comm.process_group import ProcessGroup
from mpkit.strategies.tensor.operators import by_parts, from_parts

__all__ = ["RegionInput", "Weights"]


class Weights(NamedTuple):
    """The parameters of a linear layer.

    Attributes:
        weight: [outputs, inputs].
        bias: [outputs], or None.
        across: whether weight is [inputs, outputs] instead, as in transformers' Conv1D.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    across: bool


class RegionInput:
    """x inside of a region, for the column layers that have not been called yet.

    Args:
        group: the ranks of the region.
        part: x in front of the region: [b, s, h], or [b, s/t, h] where the sequence is divided.
        x: what the region's modules are given, [b, s, h]: f or f_bar of it, for anything but the column layers.
        layers: the column layers.
        sequence: whether the sequence is divided.
    """

    def __init__(
        self, group: ProcessGroup, part: Tensor, x: Tensor, layers: Mapping[nn.Module, Weights], *, sequence: bool
    ) -> None:  # fmt: skip
        self.x = x
        self._group, self._part, self._layers, self._sequence = group, part, dict(layers), sequence
        self._made: dict[nn.Module, Tensor] | None = None

    def waits_for(self, layer: nn.Module) -> bool:
        """Return whether a column layer has its output here."""
        return layer in (self._layers if self._made is None else self._made)

    @property
    def is_used_up(self) -> bool:
        """Whether all column layers have been called."""
        return self._made == {}

    def take(self, layer: nn.Module) -> Tensor:
        """Return a column layer's y = x W^T + b; another call of the same layer is a plain one."""
        if self._made is None:
            weights = [each for w in self._layers.values() for each in (w.weight, w.bias)]
            across = [w.across for w in self._layers.values()]
            made = _Columns.apply(  # type: ignore[no-untyped-call]
                self._group, self._sequence, across, self.x.detach(), self._part, *weights
            )
            self._made = dict(zip(self._layers, made, strict=True))
        return self._made.pop(layer)


class _Columns(torch.autograd.Function):
    """(x, W_1, b_1, W_2, b_2, ...) -> y_1, y_2, ..."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, sequence: bool, across: Sequence[bool], x: Tensor, part: Tensor,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.group, ctx.sequence, ctx.across = group, sequence, across
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(part, *weights[::2])
        layers = zip(weights[::2], weights[1::2], across, strict=True)
        return tuple(F.linear(x, w.t() if t else w, b) for w, b, t in layers if w is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        part, *weights = ctx.saved_tensors
        group, wanted = ctx.group, ctx.needs_input_grad[5:]
        needs_x = any(wants and dy is not None for wants, dy in zip(wanted[::2], dys, strict=True))
        again = group.all_gather(part.contiguous(), async_op=True) if ctx.sequence and needs_x else None
        # ---- dx
        sum_of_dx = None
        if ctx.needs_input_grad[4]:
            layers = zip(dys, weights, ctx.across, strict=True)
            dx: Any = sum(dy @ (w.t() if t else w) for dy, w, t in layers if dy is not None)
            # ---- start
            if ctx.sequence:
                sum_of_dx = group.reduce_scatter(by_parts(dx, group.size), async_op=True)
            else:
                sum_of_dx = group.all_reduce(dx.contiguous(), async_op=True)
        # ---- weights
        rows = (part if again is None else from_parts(again.wait(), group.size)).flatten(0, -2)
        gradients: list[Tensor | None] = []
        for k, (dy, t) in enumerate(zip(dys, ctx.across, strict=True)):
            flat = None if dy is None else dy.flatten(0, -2)
            dw = None if flat is None or not wanted[2 * k] else rows.t() @ flat if t else flat.t() @ rows
            gradients += [dw, None if flat is None or not wanted[2 * k + 1] else flat.sum(0)]
        # ---- wait
        return None, None, None, None, None if sum_of_dx is None else sum_of_dx.wait(), *gradients
