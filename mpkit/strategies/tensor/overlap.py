"""Overlap: the gradient of a region's input is reduced while the gradients of its weights are computed.

y = x W^T has two gradients: dx = dy W, which has to be summed over the ranks, and dW = dy^T x, which does not. So the
column layers of a region compute only dx, and their dW is postponed until the sum is under way:

    backward   column layers      each computes dx
               start              the sum of dx over the ranks starts: all-reduce, or reduce-scatter
               weights            meanwhile dW = dy^T x of each column layer is computed
               wait               for the sum, which is passed on to the layer that made x

Autograd runs the nodes that are ready in reverse order of their creation, so the forward creates them in the order
wait, weights, start, when x enters. A weight's node returns a *handle*, a tensor of the shape of y without values;
the column layer takes it besides x, and the gradient that comes back through it is dy.

Where x is divided by sequence, only this rank's part [b, s/t, h] is kept for the backward, and gathered again for dW
while dx is computed. So a layer keeps s b h (34/t + 5 a s/(h t)) bytes: Korthikanti et al. 2022,
section 4.2.2 and equation 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.strategies.comm.process_group import PendingWork, ProcessGroup
from mpkit.strategies.tensor.operators import by_parts, from_parts, join_sequence

__all__ = ["RegionInput", "Weights", "enter", "linear"]


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

    @property
    def outputs(self) -> int:
        """The number of features of y."""
        return self.weight.shape[1 if self.across else 0]


@dataclass
class RegionInput:
    """x inside of a region.

    Attributes:
        x: [b, s, h], the input of the column layers.
        handles: handles of the column layers that have not been computed yet, by layer.
        part: the part of x that is kept for their backward.
    """

    x: Tensor
    handles: dict[nn.Module, Tensor]
    part: Tensor
    flight: _Flight


class _Flight:
    """The pending communication of one region's backward: the sum of dx, and the second gathering of x."""

    def __init__(self, group: ProcessGroup, *, sequence: bool) -> None:
        self.group, self.sequence = group, sequence
        self.weights = 0  # number of weights that need a gradient, and so x
        self._sum: PendingWork | None = None
        self._again: PendingWork | None = None
        self._x: Tensor | None = None
        self._left = 0

    # ---- the sum of dx

    def start(self, dx: Tensor) -> None:
        if self.sequence:
            self._sum = self.group.reduce_scatter(by_parts(dx, self.group.size), async_op=True)
        else:
            self._sum = self.group.all_reduce(dx.contiguous(), async_op=True)

    def wait(self) -> Tensor:
        assert self._sum is not None, "the backward starts the sum before it waits for it"
        summed, self._sum = self._sum.wait(), None
        return summed

    # ---- x once more

    def gather_again(self, part: Tensor) -> None:
        """Start gathering x again, when the first column layer of the backward needs it."""
        if self.sequence and self._again is None and self._x is None:
            self._again = self.group.all_gather(part.contiguous(), async_op=True)
            self._left = self.weights

    def x(self, part: Tensor) -> Tensor:
        """Return x for a weight's gradient; the last weight frees it."""
        if not self.sequence:
            return part
        self.gather_again(part)
        if self._again is not None:
            self._x, self._again = from_parts(self._again.wait(), self.group.size), None
        x = self._x
        assert x is not None
        self._left -= 1
        if not self._left:
            self._x = None
        return x


def enter(
    group: ProcessGroup, x: Tensor, layers: Sequence[tuple[nn.Module, Weights]], *, sequence: bool
) -> RegionInput:
    """Bring x into a region.

    Args:
        group: the ranks of the region.
        x: [b, s, h], or [b, s/t, h] where the sequence is divided.
        layers: the region's column layers.
        sequence: whether the sequence is divided.
    """
    flight = _Flight(group, sequence=sequence)
    part = x.detach()
    # ---- wait
    entering = _Wait.apply(flight, x)  # type: ignore[no-untyped-call]
    # ---- weights
    handles = {layer: _Weight.apply(flight, part, *weights) for layer, weights in layers}  # type: ignore[no-untyped-call]
    flight.weights = sum(handle.requires_grad for handle in handles.values())
    # ---- start
    inside = _Start.apply(flight, entering)  # type: ignore[no-untyped-call]
    return RegionInput(inside, handles, part, flight)


def linear(entered: RegionInput, layer: nn.Module, weights: Weights) -> Tensor:
    """Compute a column layer's y = x W^T + b."""
    weight, bias, across = weights
    return _Column.apply(  # type: ignore[no-any-return, no-untyped-call]
        entered.flight,
        entered.x,
        entered.part,
        entered.handles.pop(layer),
        weight.detach(),
        None if bias is None else bias.detach(),
        across,
    )


class _Wait(torch.autograd.Function):
    """Pass on x; in the backward, wait for the sum of dx."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, x: Tensor) -> Tensor:
        ctx.flight = flight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        return None, ctx.flight.wait()


class _Start(torch.autograd.Function):
    """Apply f, or f_bar; in the backward, start reducing dx and return a placeholder: `_Wait` returns the result."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, x: Tensor) -> Tensor:
        ctx.flight, ctx.shape = flight, x.shape
        return join_sequence(flight.group, x) if flight.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, Tensor]:
        ctx.flight.start(dx)
        return None, _placeholder(dx, ctx.shape)


class _Weight(torch.autograd.Function):
    """Map W, b to a handle of the shape of y; in the backward, dy to dW = dy^T x and db = sum of dy."""

    @staticmethod
    def forward(
        ctx: Any, flight: _Flight, part: Tensor, weight: Tensor, bias: Tensor | None, across: bool
    ) -> Tensor:
        ctx.flight, ctx.across = flight, across
        ctx.save_for_backward(part)
        b_s = (part.shape[0], part.shape[1] * flight.group.size, *part.shape[2:-1])
        shape = b_s if flight.sequence else part.shape[:-1]
        return _placeholder(part, (*shape, weight.shape[1 if across else 0]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (part,) = ctx.saved_tensors
        x = ctx.flight.x(part)
        dy = dy.flatten(0, -2)
        dw = db = None
        if ctx.needs_input_grad[2]:
            x = x.flatten(0, -2)
            dw = x.t() @ dy if ctx.across else dy.t() @ x
        if ctx.needs_input_grad[3]:
            db = dy.sum(0)
        return None, None, dw, db, None


class _Column(torch.autograd.Function):
    """Map x and the handle to y; in the backward, dy to dx = dy W, and to dy itself for the handle."""

    @staticmethod
    def forward(
        ctx: Any,
        flight: _Flight,
        x: Tensor,
        part: Tensor,
        handle: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        across: bool,
    ) -> Tensor:
        ctx.flight, ctx.across = flight, across
        ctx.save_for_backward(part, weight)
        return F.linear(x, weight.t() if across else weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3]
        if wanted:
            ctx.flight.gather_again(part)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = dy @ (weight.t() if ctx.across else weight)
        return None, dx, None, dy if wanted else None, None, None, None


def _placeholder(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a placeholder of that shape, which has the memory of one element."""
    return like.new_zeros(()).expand(tuple(shape))
