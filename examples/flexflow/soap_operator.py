"""One layer in algebraic form, and parts of its tensors.

linear        Y = X A + b                       X (B, L, in)   A (in, out)   b (out)   Y (B, L, out)
layer norm    Y = γ (X - μ) / √(σ² + ε) + β     X (B, L, n)    γ, β (n)                Y (B, L, n)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mpkit.strategies.comm.communicator import Communicator

Box = tuple[tuple[int, int], ...]
"""Which part of a tensor: the first index and the one after the last, by dimension."""


@dataclass
class AlgebraicOperator:
    """A layer in algebraic form.

    Attributes:
        kind: "linear" or "layer_norm".
        parameters: A (in, out) and optionally b (out); or γ (n) and optionally β (n).
        eps: the ε of a layer norm.
    """

    kind: str
    parameters: dict[str, Tensor]
    eps: float = 0.0

    def __call__(self, x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """Map an input (..., in) to an output (..., out)."""
        if self.kind == "linear":
            return add_bias(x @ parameters["A"], parameters, "b")
        return add_bias(
            parameters["γ"] * normalize(x, x.mean(-1), x.var(-1, correction=0), self.eps), parameters, "β"
        )

    @property
    def names(self) -> str:
        """The gradients of the parameters, in words."""
        return ", ".join(f"∂{name}" for name in self.parameters)


def add_bias(y: Tensor, parameters: dict[str, Tensor], name: str) -> Tensor:
    """Add the bias of that name to y, if there is one."""
    return y + parameters[name] if name in parameters else y


def normalize(x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Compute (x - μ) / √(σ² + ε), where μ and σ² are those of each row."""
    return (x - mean[..., None]) * torch.rsqrt(variance + eps)[..., None]


@dataclass
class Pieces:
    """The parts of tensors that a rank has.

    Attributes:
        boxes: by tensor (X, the parameters, Y), which part of the whole it is.
        values: the values of these parts.
        gradients: the gradients of the parts of X and of the parameters.
    """

    boxes: dict[str, Box]
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def whole(tensor: Tensor) -> Box:
    """Return the box that covers the whole tensor."""
    return tuple((0, size) for size in tensor.shape)


def mine(tensor: Tensor, dim: int, axis: Communicator) -> Box:
    """Return the box of this rank's part, with `dim` divided."""
    n, size = axis.size, tensor.shape[dim]
    box = list(whole(tensor))
    box[dim] = (axis.index * size // n, (axis.index + 1) * size // n)
    return tuple(box)


def cut(tensor: Tensor, box: Box) -> Tensor:
    """Return that part of the values as an autograd leaf."""
    return tensor[tuple(slice(*edge) for edge in box)].detach().clone().requires_grad_()


def pieces(boxes: dict[str, Box], values: dict[str, Tensor]) -> Pieces:
    """Collect the pieces of tensors, with the gradients that autograd has left in them."""
    gradients = {
        name: value.grad for name, value in values.items() if value.is_leaf and value.grad is not None
    }
    return Pieces(boxes, {name: value.detach() for name, value in values.items()}, gradients)
