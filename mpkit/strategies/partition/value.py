"""Value: a tensor that one of the stages makes, as every rank encounters it in the model's own forward.

It knows its shape, dtype, device, and whether it requires a gradient. On the stage that made it, and on those that
received it, the tensor itself is behind it; elsewhere nothing is, and it is a stand-in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpkit.common.torch_private import _disabled_torch_function_impl
from mpkit.strategies.partition.boundary import Spec

__all__ = ["Value", "ValueLooked", "spec_of"]


class ValueLooked(Exception):
    """Raised when the numbers of a Value are needed."""


class Value(Tensor):
    """A tensor that a stage makes, or a parameter that another rank holds.

    Attributes:
        number: number of its current value in the graph (writing into it makes it another); -1 for a parameter.
        behind: the tensor itself; None where it is not known.
        called: name of the parameter, if it is one.
        stale: whether it shares memory with another that was written into; set in the dry run only.
    """

    number: int
    behind: Tensor | None
    called: str
    stale: bool

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
