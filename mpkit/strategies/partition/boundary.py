"""What a layer makes of a micro-batch, and what crosses from one stage to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkit.trace.record.flops import Flops

__all__ = ["Boundary", "LayerNumbers", "Route", "SharedWeight", "Spec"]


class Spec(NamedTuple):
    """A tensor that crosses from a layer to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Boundary:
    """What crosses from a layer to the next: a tensor, or a tuple of tensors.

    Attributes:
        specs: one per tensor.
        single: whether the value is a tensor itself, not a tuple of one.
    """

    specs: tuple[Spec, ...]
    single: bool = True

    @classmethod
    def from_output(cls, value: Any) -> Boundary | None:
        """Return the boundary for a layer's output, or None if that is neither a tensor nor a tuple of tensors."""
        tensors = (value,) if isinstance(value, Tensor) else value
        if not isinstance(tensors, tuple) or not all(isinstance(t, Tensor) for t in tensors) or not tensors:
            return None
        specs = tuple(Spec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        return cls(specs, isinstance(value, Tensor))

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of each tensor."""
        return [(spec.shape, spec.dtype) for spec in self.specs]

    def pack(self, tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Return the value that a layer is called with."""
        return tensors[0] if self.single else tensors

    def __str__(self) -> str:
        shapes = [f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}" for spec in self.specs]
        return shapes[0] if self.single else f"({', '.join(shapes)})"


class Route(NamedTuple):
    """What one stage sends to a later one for a micro-batch; gradients come back along it.

    Attributes:
        source, target: the stages at both ends.
        which: numbers of the source's outputs that are sent.
        specs: one per tensor.
    """

    source: int
    target: int
    which: tuple[int, ...]
    specs: tuple[Spec, ...]


@dataclass(frozen=True)
class SharedWeight:
    """A weight that several stages compute with, and so train together.

    Attributes:
        names: the weight's name in each of the stages, in order.
    """

    names: dict[int, str]


@dataclass(frozen=True)
class LayerNumbers:
    """What a layer does with one micro-batch.

    Attributes:
        flops: FLOPs and bytes of forward and backward.
        output: what it passes on; None if that cannot be sent.
        in_place: whether it writes into its input.
    """

    flops: Flops
    output: Boundary | None
    in_place: bool = False
