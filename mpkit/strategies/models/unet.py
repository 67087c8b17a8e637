"""A U-Net: skip connections from the first half of the network to the second, across any cut between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["UNet"]


class UNet(nn.Module):
    """Map images [batch, channels, height, width] to scores per class and pixel, [batch, outputs, height, width].

    Each step down halves the size and doubles the channels; each step up undoes one, and also takes the features of the
    same size from the way down: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation",
    MICCAI 2015, figure 1. In a pipeline these skips travel directly to the stage that needs them. The model normalizes
    by group.

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
        self.down = nn.ModuleList(
            Double(a, b) for a, b in zip([channels, *widths], widths[:-1], strict=False)
        )
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
        scores: Tensor = self.head(x)
        return scores


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
