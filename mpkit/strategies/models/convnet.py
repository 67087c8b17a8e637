"""A small convolutional network for images."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.strategies.models.chain import SizedChain

__all__ = ["ConvNet"]


class ConvNet(SizedChain):
    """Map images [batch, channels, height, width] to [batch, outputs]; a chain of `stem`, `block0`, ..., `head`.

    The residual blocks follow He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. They normalize by
    group (Wu and He 2018) and not by batch: a batch norm's mean over a micro-batch differs from that over the batch,
    so micro-batches would train a different model.

    >>> ConvNet(channels=1, outputs=4)(__import__("torch").zeros(2, 1, 16, 16)).shape
    torch.Size([2, 4])

    Args:
        channels: channels of the images.
        outputs: the number of classes.
        width: channels inside; a multiple of 4.
        layers: the number of residual blocks.
    """

    def __init__(self, channels: int, outputs: int, *, width: int = 16, layers: int = 3) -> None:
        if width % 4:
            raise ValueError(
                f"ConvNet(width={width}): the width is normalized in 4 groups, so 4 must divide it: "
                f"width={width + 4 - width % 4} does."
            )
        blocks = ((f"block{i}", Residual(width)) for i in range(layers))
        stem = nn.Conv2d(channels, width, 3, padding=1)
        super().__init__(OrderedDict([("stem", stem), *blocks, ("head", Classifier(width, outputs))]))


class Residual(nn.Module):
    """x + two convolutions of x [batch, width, height, width], each normalized."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> the same."""
        y = self.conv1(F.relu(self.norm1(x)))
        y = self.conv2(F.relu(self.norm2(y)))
        total: Tensor = x + y
        return total


class Classifier(nn.Module):
    """The mean over the image, then a linear map."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, outputs]."""
        scores: Tensor = self.linear(F.relu(x).mean(dim=(2, 3)))
        return scores
