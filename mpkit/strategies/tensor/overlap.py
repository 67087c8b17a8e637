"""Overlap: the gradient of a region's input is reduced while the gradients of its weights are computed.

y = x W^T has two gradients: dx = dy W, which has to be summed over the ranks, and dW = dy^T x, which does not. So all
column layers of a region are one node of autograd's graph. The layer that is called first makes it, and the others take
their output from it. Its backward:

    dx         of all column layers: the sum of dy_i W_i
    start      the sum of dx over the ranks: all-reduce, or reduce-scatter
    weights    meanwhile dW_i = dy_i^T x
    wait       for the sum, in a node of its own before it: autograd adds the dW_i to their weights first

If x is divided by sequence, the backward keeps only this rank's part [b, s/t, h], and gathers x again for dW while it
computes dx. So a layer keeps s b h (34/t + 5 a s/(h t)) bytes: Korthikanti et al. 2022, section 4.2.2 and equation 4.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.wire import PendingWork
from mpkit.strategies.tensor.operators import by_parts, from_parts


class RegionInput:
    """x of a region, and the outputs of the column layers for it.

    Args:
        x: [b, s, h], or [b, s/t, h] if the sequence is divided.
        inside: [b, s, h], the input of the region's modules: x through f, or f_bar.
        layers: the region's column layers, each with whether its weight is [inputs, outputs].
        sequence: whether the sequence is divided.
    """

    def __init__(
        self, group: Communicator, x: Tensor, inside: Tensor, layers: dict[nn.Module, bool], *, sequence: bool
    ) -> None:
        self._group, self._x, self._layers, self._sequence = group, x, layers, sequence
        self.inside, self.left = inside, set(layers)  # left: have not taken their output
        self._outputs: dict[nn.Module, Tensor] | None = None

    def take(self, layer: nn.Module) -> Tensor | None:
        """Return y = x W^T + b of a column layer; None if it has taken it before."""
        if self._outputs is None:
            weights = [each for one in self._layers for each in (one.weight, one.bias)]
            pending: list[PendingWork] = []
            x = _Wait.apply(pending, self._x)  # type: ignore[no-untyped-call]
            how = self._group, self._sequence, tuple(self._layers.values()), pending
            made: Any = _Columns.apply(how, x, self.inside.detach(), *weights)  # type: ignore[no-untyped-call]
            self._outputs = dict(zip(self._layers, made, strict=True))
        self.left.discard(layer)
        return self._outputs.pop(layer, None)


class _Wait(torch.autograd.Function):
    """Pass on x; in the backward, wait for the sum of dx."""

    @staticmethod
    def forward(ctx: Any, pending: list[PendingWork], x: Tensor) -> Tensor:
        ctx.pending = pending
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        return None, ctx.pending.pop().wait()


class _Columns(torch.autograd.Function):
    """(x, W_1, b_1, W_2, b_2, ...) -> (y_1, y_2, ...), with f or f_bar in front."""

    @staticmethod
    def forward(
        ctx: Any, how: tuple[Communicator, bool, Sequence[bool], list[PendingWork]], x: Tensor, inside: Tensor,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.how = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights[::2])
        layers: Any = zip(weights[::2], weights[1::2], how[2], strict=True)
        return tuple(F.linear(inside, w.t() if transposed else w, b) for w, b, transposed in layers)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        (group, sequence, across, pending), (x, *weights) = ctx.how, ctx.saved_tensors
        wants = ctx.needs_input_grad[3:]
        called = [i for i, dy in enumerate(dys) if dy is not None]
        trains = any(wants[2 * i] for i in called)
        again = group.all_gather(x.contiguous(), async_op=True) if sequence and trains else None
        # ---- dx, start
        placeholder = None
        if ctx.needs_input_grad[1]:
            parts: Any = (dys[i] @ (weights[i].t() if across[i] else weights[i]) for i in called)
            dx = reduce(torch.add, parts)  # `sum` would begin with 0, and copy the first part
            if sequence:
                pending.append(group.reduce_scatter(by_parts(dx, group.size), async_op=True))
            else:
                pending.append(group.all_reduce(dx, async_op=True))
            placeholder = x.new_zeros(()).expand(x.shape)  # `_Wait` returns the sum
        # ---- weights
        rows = (x if again is None else from_parts(again.wait(), group.size)).flatten(0, -2)
        gradients: list[Tensor | None] = [None] * len(wants)
        for i in called:
            dy: Any = dys[i]
            dy = dy.flatten(0, -2)
            if wants[2 * i]:
                gradients[2 * i] = rows.t() @ dy if across[i] else dy.t() @ rows
            if wants[2 * i + 1]:
                gradients[2 * i + 1] = dy.sum(0)
        return None, placeholder, None, *gradients
