"""Resharding on real ranks, as an autograd function: from the parts that ranks have of a tensor to those they want.

    forward     slice, where each rank wants a part of what it has; else all-gather, then slice
    backward    the part of the gradient that a rank has is whole where nobody else works on the same: slice; else
                all ranks' parts are summed with an all-reduce, then slice

A `Box` says which part of a tensor a rank has. Whole tensors pass through the ranks for a moment, so that
this is to be read and to be checked; the prices (`examples.flexflow.resharding`) are those of smaller groups.

Source: Jia, Zaharia, Aiken 2019, section 5; the conjugate pair, Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.flexflow.layer import TensorLayout
from mpkit.strategies.comm.communicator import Communicator

__all__ = ["Box", "Exchange", "box_of", "dims_of", "exchange_parts", "take_box"]

Box = tuple[tuple[float, float], ...]
"""By samples, attribute and channels: where the part begins and ends, as shares of the dimension."""


class Places(NamedTuple):
    """Which of the parts along each dimension a rank has."""

    sample: int
    attribute: int
    channel: int


def place_of(rank: int, ranks: int, layout: TensorLayout) -> Places:
    """Return which part a rank has; ranks with the same part are neighbours.

    >>> [place_of(rank, 4, TensorLayout(2)).sample for rank in range(4)]
    [0, 0, 1, 1]
    """
    part, channel = divmod(rank * layout.parts // ranks, layout.channel)
    return Places(*divmod(part, layout.attribute), channel)


def box_of(rank: int, ranks: int, work: TensorLayout, channels: bool = True) -> Box:
    """Return the part that a rank has where the work is divided by a layout.

    Args:
        rank, ranks: which rank, and how many there are.
        work: how the work is divided.
        channels: whether the tensor is divided by channels as the work is; else the rank has all of them.
    """
    places = place_of(rank, ranks, work)
    divided = (work.sample, work.attribute, work.channel if channels else 1)
    at = (places.sample, places.attribute, places.channel if channels else 0)
    return tuple((place / n, (place + 1) / n) for place, n in zip(at, divided, strict=True))


def dims_of(tensor: Tensor) -> tuple[int | None, int | None, int | None]:
    """Return the tensor's dimensions of samples, attribute and channels; images have their channels before rows."""
    if tensor.dim() == 4:
        return 0, 2, 1
    return 0, (1 if tensor.dim() == 3 else None), (tensor.dim() - 1 if tensor.dim() > 1 else None)


def take_box(whole: Tensor, box: Box) -> Tensor:
    """Return the part of a whole tensor that a box says."""
    for dim, (begin, end) in zip(dims_of(whole), box, strict=True):
        if dim is not None:
            size = whole.shape[dim]
            whole = whole.narrow(dim, round(begin * size), round(end * size) - round(begin * size))
    return whole


@dataclass(frozen=True)
class Exchange:
    """What is known of a resharding on every rank.

    Attributes:
        comm: all ranks.
        there: by rank, the part of the tensor that it has.
        wanted: by rank, the part that it wants.
        copies: the number of ranks that compute the same with what they get, and so have the same gradient of it.
        complete: whether a rank's gradient of its part is whole; else it is one of the terms of a sum.
    """

    comm: Communicator
    there: list[Box]
    wanted: list[Box]
    copies: int
    complete: bool

    @property
    def slices(self) -> bool:
        """Whether each rank wants a part of what it has."""
        return all(
            a <= c and d <= b
            for has, wants in zip(self.there, self.wanted, strict=True)
            for (a, b), (c, d) in zip(has, wants, strict=True)
        )

    @property
    def stays(self) -> bool:
        """Whether the gradient that each rank has is, or holds, all of what it is to have."""
        holds = (
            c <= a and b <= d
            for has, wants in zip(self.there, self.wanted, strict=True)
            for (a, b), (c, d) in zip(has, wants, strict=True)
        )
        return self.complete and all(holds)


def share_within(outer: Box, inner: Box) -> Box:
    """Return where a part lies inside another one that holds it, as shares of the latter."""
    return tuple(((c - a) / (b - a), (d - a) / (b - a)) for (a, b), (c, d) in zip(outer, inner, strict=True))


def whole_shape(part: Tensor, box: Box) -> list[int]:
    """Return the shape of the whole tensor."""
    shape = list(part.shape)
    for dim, (begin, end) in zip(dims_of(part), box, strict=True):
        if dim is not None:
            shape[dim] = round(shape[dim] / (end - begin))
    return shape


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        rank, comm = exchange.comm.rank, exchange.comm
        # ---- slice
        if exchange.slices:
            return take_box(part, share_within(exchange.there[rank], exchange.wanted[rank])).clone()
        # ---- all-gather, slice
        gathered = comm.all_gather(part.detach().contiguous()[None])
        whole = part.new_empty(whole_shape(part, exchange.there[rank]))
        for box, each in zip(exchange.there, gathered, strict=True):
            take_box(whole, box).copy_(each)
        return take_box(whole, exchange.wanted[rank]).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange: Exchange = ctx.exchange
        grad, rank = grads[0], exchange.comm.rank
        # ---- slice
        if exchange.stays:
            return take_box(grad, share_within(exchange.wanted[rank], exchange.there[rank])).clone(), None
        # ---- all-reduce, slice
        whole = grad.new_zeros(whole_shape(grad, exchange.wanted[rank]))
        take_box(whole, exchange.wanted[rank]).copy_(grad)
        exchange.comm.all_reduce(whole)
        return take_box(whole, exchange.there[rank]).div(exchange.copies), None


def exchange_parts(part: Tensor, exchange: Exchange) -> Tensor:
    """Return the part of a tensor that this rank wants; its gradient goes back to those that had the parts.

    Args:
        part: what this rank has.
        exchange: who has and who wants what.
    """
    result: Tensor = _Reshard.apply(part, exchange)  # type: ignore[no-untyped-call]
    return result
