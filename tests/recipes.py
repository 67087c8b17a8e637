"""Optimizers, losses and data that ranks are given; a rank imports the module that they are from: this one is light."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def adamw(params: Any) -> torch.optim.Optimizer:
    """With a rate at which a few steps show.

    Some gradients are zero but for rounding (of a bias before the normalisation of one number, say). Adam divides
    a gradient by its own size plus eps: so eps is far above what rounding makes, 1e-16, and below what counts.
    """
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-6)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Without momentum: what is wrong with a gradient shows as it is."""
    return torch.optim.SGD(params, lr=0.1)


def logits_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Of transformers' models."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def normal(*shape: int) -> Tensor:
    """Of 64 bits, in which parallel training is compared to twelve digits."""
    return torch.randn(*shape, dtype=torch.float64)
