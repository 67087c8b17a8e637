"""What a layer makes of a micro-batch, what crosses from stage to stage, and `Value`: a tensor that one of the stages
makes, as every rank encounters it in the model's own forward.

A Value knows its shape, dtype, device, and whether it requires a gradient. On the stage that made it, and on those that
received it, the tensor itself is behind it; elsewhere it is a stand-in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpkit.common.torch_private import _disabled_torch_function_impl
from mpkit.trace.record.flops import Flops


class Spec(NamedTuple):
    """A tensor that crosses from a layer to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Boundary:
    """What crosses from a layer to the next: a tensor, or a tuple of tensors."""

    specs: tuple[Spec, ...]  # one per tensor
    single: bool = True  # whether the value is a tensor itself, not a tuple of one

    @classmethod
    def from_output(cls, value: Any) -> Boundary | None:
        """Return the boundary for a layer's output; None if that is neither a tensor nor a tuple of tensors."""
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
    """What one stage sends to a later one for a micro-batch; gradients come back along it."""

    source: int
    target: int
    which: tuple[int, ...]  # numbers of the source's outputs that are sent
    specs: tuple[Spec, ...]  # one per tensor


@dataclass(frozen=True)
class SharedWeight:
    """A weight that several stages compute with, and so train together."""

    names: dict[int, str]  # by stage


@dataclass(frozen=True)
class LayerNumbers:
    """What a layer does with one micro-batch."""

    flops: Flops  # of forward and backward
    output: Boundary | None  # what it passes on; None if that cannot be sent
    in_place: bool = False  # whether it writes into its input


class ValueLooked(Exception):
    """Raised when the numbers of a Value are needed."""


class Value(Tensor):
    """A tensor that a stage makes, or a parameter that another rank holds."""

    number: int  # of its current value in the graph (writing into it makes it another); -1 for a parameter
    behind: Tensor | None  # the tensor itself; None where it is not known
    called: str  # the name of the parameter, if it is one
    stale: bool  # whether it shares memory with another that was written into; set in the dry run only

    @staticmethod
    def __new__(
        cls, spec: Spec, device: torch.device, number: int, behind: Tensor | None = None, called: str = ""
    ) -> Value:
        """Make a stand-in for a tensor with this spec, or a value with the tensor `behind` it."""
        made: Value = Tensor._make_wrapper_subclass(
            cls, spec.shape, dtype=spec.dtype, device=device, requires_grad=spec.requires_grad
        )
        made.number, made.behind, made.called, made.stale = number, behind, called, False
        return made

    # `walk` intercepts operations before they get here; only questions about shapes are answered here.
    __torch_function__ = _disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise ValueLooked(str(func))


def spec_of(tensor: Tensor) -> Spec:
    """Return what is known about a tensor without its numbers."""
    return Spec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
