"""A multi-layer perceptron."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.strategies.models.chain import SizedChain

__all__ = ["MLP"]


class MLP(SizedChain):
    """Map [batch, inputs] to [batch, outputs] through `layers` hidden layers; a chain of `hidden0`, ..., `head`.

    >>> MLP(inputs=2, outputs=3, width=16, layers=4)(__import__("torch").zeros(5, 2)).shape
    torch.Size([5, 3])

    Args:
        inputs: features per sample.
        outputs: classes, or values to predict.
        width: the width of each hidden layer.
        layers: the number of hidden layers.
    """

    def __init__(self, inputs: int, outputs: int, *, width: int = 64, layers: int = 4) -> None:
        widths = [inputs] + [width] * layers
        hidden = ((f"hidden{i}", Hidden(widths[i], width)) for i in range(layers))
        super().__init__(OrderedDict([*hidden, ("head", nn.Linear(widths[-1], outputs))]))


class Hidden(nn.Module):
    """A linear map and a GELU: [batch, inputs] -> [batch, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs] -> [batch, outputs]."""
        return F.gelu(self.linear(x))
