"""Tensor parallel.

One layer on several ranks: each has a part of the matrix, and all work on the same samples. Here you cut a matrix by
columns and by rows, then an MLP, attention and the loss, and count what has to be sent for it.

Sources: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019;
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TITLE = "Tensor parallel"
PLACE = 5


# %% given
class Operator(torch.autograd.Function):
    """An autograd function that applies one function in the forward and another in the backward."""

    @staticmethod
    def forward(
        saved: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return y = `forward(x)`, and save `backward` for later."""
        saved.backward_of = backward
        return forward(x.detach().clone())

    @staticmethod
    def backward(saved: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """Return dx = `backward(dy)`."""
        return saved.backward_of(dy.detach().clone()), None, None


def operator(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `forward(x)`, whose backward gives x the gradient `backward(dy)`."""
    return Operator.apply(x, forward, backward)


# %% checks
def gradients(x: Tensor, **layers: nn.Linear) -> dict[str, Tensor | None]:
    """Return the gradients by name: "gradient of x", "gradient of up.weight"."""
    named = {
        f"{name}.{key}": each for name, layer in layers.items() for key, each in layer.named_parameters()
    }
    return {f"gradient of {name}": each.grad for name, each in {"x": x, **named}.items()}
