"""Buckets: gradients side by side in one flat tensor, so that many small ones are sent as one.

A parameter's gradient is a view of its bucket, into which autograd adds in place: nothing is copied in or out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mpkit.parallel.axis import Waiting

__all__ = ["Bucket", "fill_buckets"]

FIRST_BYTES = 2**20
"""The first bucket is small, so that communication begins early; PyTorch's DDP does the same."""


class Bucket:
    """The gradients of some parameters of one dtype.

    Attributes:
        flat: (sum of their elements,).
        views: each parameter's part, in its shape.
        missing: parameters whose gradient has not come in this step.
        work: the communication under way, if any.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        parts = self.flat.split(sizes)
        self.views = {p: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}
        self.missing: set[nn.Parameter] = set()
        self.work: Waiting | None = None

    def begin(self) -> None:
        """A new step: all gradients zero, none there."""
        self.flat.zero_()
        self.missing = set(self.views)
        for parameter, view in self.views.items():
            parameter.grad = view

    def take(self, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
        """These are the gradients now."""
        for parameter, view in self.views.items():
            gradient = gradients[parameter]
            if gradient is not None:
                view.copy_(gradient)
            parameter.grad = None if gradient is None else view

    def wait(self) -> None:
        """Until what is under way is complete."""
        if self.work is not None:
            self.work.wait()
            self.work = None


def fill_buckets(
    parameters: Iterable[nn.Parameter], nbytes: int, alike: Collection[nn.Parameter] = ()
) -> list[Bucket]:
    """Buckets that are full with `nbytes` or more, the first of a dtype with 1 MiB, as PyTorch's DDP fills them.

    Args:
        parameters: in the order in which their gradients come.
        nbytes: of a bucket.
        alike: parameters that other ranks hold too, beside shards of other sizes than here. They have buckets of their
            own, so that their sums are made in the same order everywhere, and are the same to the last bit.

    >>> layers = [nn.Parameter(torch.empty(n)) for n in (100_000, 200_000, 300_000, 500_000, 1)]
    >>> [len(bucket.views) for bucket in fill_buckets(layers, nbytes=3_000_000)]
    [2, 2, 1]
    """
    buckets: list[list[nn.Parameter]] = []
    filling: dict[
        tuple[torch.dtype, bool], tuple[list[nn.Parameter], int]
    ] = {}  # and the bytes it is full with
    for parameter in parameters:
        kind = parameter.dtype, parameter in alike
        bucket, limit = filling.get(kind, ([], min(FIRST_BYTES, nbytes)))
        if not bucket:
            buckets.append(bucket)
        bucket.append(parameter)
        full = sum(p.nbytes for p in bucket) >= limit
        filling[kind] = ([], nbytes) if full else (bucket, limit)
    return [Bucket(bucket) for bucket in buckets]
