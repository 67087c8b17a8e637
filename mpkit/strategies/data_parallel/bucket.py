"""Buckets: gradients side by side in one flat tensor, so that many small ones are sent as one.

A parameter's gradient is a view of its bucket, into which autograd adds in place: nothing is copied in or out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mpkit.strategies.comm.process_group import PendingWork

__all__ = ["Bucket", "fill_buckets", "zeros_for"]

FIRST_BYTES = 2**20
"""The first bucket is small, so that communication begins early; PyTorch's DDP does the same."""


class Bucket:
    """The gradients of some parameters of one dtype.

    Args:
        parameters: the parameters.
        flat: memory for their gradients, (sum of their elements,); None: allocate it.

    Attributes:
        flat: the gradients side by side.
        views: each parameter's slice of `flat`, in the parameter's shape.
        missing: parameters whose gradient has not arrived yet in this step.
        work: the pending communication, if any.
    """

    def __init__(self, parameters: list[nn.Parameter], flat: Tensor | None = None) -> None:
        self.flat = zeros_for(parameters) if flat is None else flat
        parts = self.flat.split([parameter.numel() for parameter in parameters])
        self.views = {p: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
        self.missing: set[nn.Parameter] = set()
        self.work: PendingWork | None = None

    def begin(self) -> None:
        """Zero all gradients and mark them as missing, at the beginning of a step."""
        self.flat.zero_()
        self.missing = set(self.views)
        for parameter, view in self.views.items():
            parameter.grad = view

    def wait(self) -> None:
        """Wait until the pending communication is complete."""
        if self.work is not None:
            self.work.wait()
            self.work = None


def zeros_for(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Allocate zeros for the gradients of parameters of one dtype, side by side."""
    count, first = sum(parameter.numel() for parameter in parameters), parameters[0]
    return torch.zeros(count, dtype=first.dtype, device=first.device)


def fill_buckets(
    parameters: Iterable[nn.Parameter],
    nbytes: int,
    unsharded: Collection[nn.Parameter] = (),
    experts: Collection[nn.Parameter] = (),
) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets of `nbytes` each, the first of each dtype of 1 MiB, as in PyTorch's DDP.

    Args:
        parameters: in the order in which their gradients arrive.
        nbytes: size at which a bucket is full.
        unsharded: parameters that other ranks hold too, beside shards of other sizes than here. They get buckets of
            their own, so that their sums are made in the same order everywhere, and agree to the last bit.
        experts: parameters that fewer ranks hold than the others, and so are sent among those only.

    >>> layers = [nn.Parameter(torch.empty(n)) for n in (100_000, 200_000, 300_000, 500_000, 1)]
    >>> [len(bucket) for bucket in fill_buckets(layers, nbytes=3_000_000)]
    [2, 2, 1]
    """
    buckets: list[list[nn.Parameter]] = []
    filling: dict[
        tuple[torch.dtype, bool, bool], tuple[list[nn.Parameter], int]
    ] = {}  # each with the size at which it is full
    for parameter in parameters:
        kind = parameter.dtype, parameter in unsharded, parameter in experts
        bucket, limit = filling.get(kind, ([], min(FIRST_BYTES, nbytes)))
        if not bucket:
            buckets.append(bucket)
        bucket.append(parameter)
        full = sum(p.nbytes for p in bucket) >= limit
        filling[kind] = ([], nbytes) if full else (bucket, limit)
    return buckets
