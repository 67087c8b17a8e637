"""Small networks: a multi-layer perceptron, and for images a chain, and a model with skips."""

from collections import OrderedDict
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Sequential):
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


class ConvNet(nn.Sequential):
    """Map images [batch, channels, height, width] to [batch, outputs]; a chain of `stem`, `block0`, ..., `head`.

    The residual blocks follow He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. They normalize by
    group (Wu and He 2018) and not by batch: a batch norm's mean over a micro-batch is not that over the batch, so
    micro-batches would train another model.

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
        return x + y


class Classifier(nn.Module):
    """The mean over the image, then a linear map."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, outputs]."""
        return self.linear(F.relu(x).mean(dim=(2, 3)))


class UNet(nn.Module):
    """Map images [batch, channels, height, width] to scores per class and pixel, [batch, outputs, height, width].

    Each step down halves the size and doubles the channels; each step up undoes one, and also takes the features of the
    same size from the way down: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation",
    MICCAI 2015, figure 1. In a pipeline these skips go directly to the stage that needs them. The model normalizes by
    group.

    >>> UNet(channels=1, outputs=2, levels=2)(__import__("torch").zeros(3, 1, 16, 12)).shape
    torch.Size([3, 2, 16, 12])

    Args:
        channels: channels of the images.
        outputs: the number of classes of pixels.
        width: channels at full size; a multiple of 4.
        levels: the number of steps down; each halves height and width, so 2**levels has to divide them.
    """

    def __init__(self, channels: int, outputs: int, *, width: int = 8, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(Double(a, b) for a, b in pairwise([channels, *widths[:-1]]))
        self.bottom = Double(widths[-2], widths[-1])
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(Double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, outputs, height, width]."""
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([skips.pop(), widen(x)], dim=1))
        return self.head(x)


class Double(nn.Module):
    """Two convolutions, each normalized, with a ReLU after each: [batch, inputs, h, w] -> [batch, outputs, h, w]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, h, w] -> [batch, outputs, h, w]."""
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)))
