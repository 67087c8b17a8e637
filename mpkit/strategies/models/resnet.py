"""A residual network as usually written: a class with a forward, groups of blocks and batch norms, not a chain."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ResNet"]


class ResNet(nn.Module):
    """Map images [batch, channels, height, width] to [batch, outputs].

    The model has groups of basic blocks, each group with twice the channels and half the size of the previous one: He
    et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2. In micro-batches, BatchNorm
    takes its statistics over each of them, which a plan has to ask for: `Plan(batchnorm="local")`.

    >>> ResNet(channels=1, outputs=4, groups=(1, 1))(__import__("torch").zeros(2, 1, 16, 16)).shape
    torch.Size([2, 4])

    Args:
        channels: channels of the images.
        outputs: the number of classes.
        width: channels in the first group.
        groups: the number of blocks in each group.
    """

    def __init__(
        self, channels: int, outputs: int, *, width: int = 16, groups: tuple[int, ...] = (2, 2, 2)
    ) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.groups = nn.ModuleList()
        for i, blocks in enumerate(groups):
            wide, before = width * 2**i, width * 2 ** max(i - 1, 0)
            first = Basic(before, wide, stride=1 if i == 0 else 2)
            self.groups.append(nn.Sequential(first, *(Basic(wide, wide) for _ in range(blocks - 1))))
        self.head = nn.Linear(width * 2 ** (len(groups) - 1), outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, outputs]."""
        x = F.relu(self.norm(self.stem(x)))
        for group in self.groups:
            x = group(x)
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


class Basic(nn.Module):
    """relu(x + two normalized convolutions of x): [batch, inputs, h, w] -> [batch, outputs, h/stride, w/stride]."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1, self.relu = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.conv2, self.norm2 = (
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride > 1 or inputs != outputs
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, h, w] -> [batch, outputs, h/stride, w/stride]."""
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        total: Tensor = self.relu(y + (x if self.shortcut is None else self.shortcut(x)))
        return total
